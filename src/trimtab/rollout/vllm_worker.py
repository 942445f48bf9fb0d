"""What runs inside vLLM's workers: taking over weights, completely.

vLLM mixes this class into its worker by name (`worker_extension_cls`). Three things that its own reload leaves out each
end in wrong log-probs and a report of success: a tied head that keeps its own packed copy (CPU), weights that no
parameter took, and keys and values computed under the old weights (the engine resets those).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from trimtab.rollout.handover import Entry, SharedWeights


class WeightLoading:
    """Mixed into a vLLM worker: `self.model_runner` is the worker's."""

    model_runner: Any

    def load_published(self, path: str, entries: list[Entry]) -> None:
        """Replace every weight by those of the shared file `path`, under the names of the checkpoint.

        Raises:
            RuntimeError: a parameter of vLLM's model took nothing.
        """
        model = self.model_runner.get_model()
        wanted = {name for name, _ in model.named_parameters()}
        loaded: set[str] = set()
        load = model.load_weights

        def remember(weights: Iterable[tuple[str, Tensor]]) -> set[str]:
            loaded.update(load(weights))
            return loaded

        shared = SharedWeights(os.open(path, os.O_RDONLY), entries)
        # What was left out is only logged by the reload, which does not hand the names on.
        model.load_weights = remember
        try:
            self.model_runner.reload_weights(weights_iterator=iter(shared), is_checkpoint_format=True)
        finally:
            del model.load_weights
            shared.close()
        if self.model_runner.model_config.quantization is None and wanted - loaded:
            raise RuntimeError(f"vLLM did not take over {sorted(wanted - loaded)[:3]} ({len(wanted - loaded)} weights)")
        self._repack_tied_head(model)

    def _repack_tied_head(self, model: Any) -> None:
        """On a CPU a head packs its weight when it is loaded; a tied one is never loaded again, its twin is."""
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
        from vllm.platforms import current_platform

        if current_platform.is_cpu() and getattr(model.config, "tie_word_embeddings", False):
            dispatch_cpu_unquantized_gemm(model.lm_head, remove_weight=False)
