"""The extension inside vLLM's workers that loads weight updates.

vLLM mixes this class into its worker by name (`worker_extension_cls`). Three things that its own reload leaves out each
end in wrong log-probs and a report of success: a tied head that keeps its own packed copy (CPU), weights that no
parameter took, and keys and values computed under the old weights (the engine resets those).
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from trimtab.engines.remote.shared_weights import Entry, SharedWeights


class WeightLoading:
    """Mixed into a vLLM worker: `self.model_runner` is the worker's."""

    model_runner: Any

    def load_published(self, path: str, entries: list[Entry]) -> list[str]:
        """Replace every weight by those of the shared file `path`, under the names of the checkpoint.

        Returns the names of parameters of vLLM's model that took nothing: there must be none.
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
        self._repack_tied_head(model)
        # Quantized layers have parameters that no checkpoint holds.
        return sorted(wanted - loaded) if self.model_runner.model_config.quantization is None else []

    def end_with(self, pid: int) -> None:
        """Die with process `pid`: vLLM's own processes outlive one that is killed, and hold its memory."""
        descriptor = os.pidfd_open(pid)
        threading.Thread(target=_end_with, args=(descriptor,), name="end with the trainer", daemon=True).start()

    def _repack_tied_head(self, model: Any) -> None:
        """On a CPU a head packs its weight when it is loaded; a tied one is never loaded again, its twin is."""
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm  # pyright: ignore[reportMissingImports]
        from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

        if current_platform.is_cpu() and getattr(model.config, "tie_word_embeddings", False):
            dispatch_cpu_unquantized_gemm(model.lm_head, remove_weight=False)


def _end_with(descriptor: int) -> None:
    select.select([descriptor], [], [])
    os._exit(1)
