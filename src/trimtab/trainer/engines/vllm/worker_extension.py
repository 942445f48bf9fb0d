"""The extension inside vLLM's workers that loads weight updates.

vLLM mixes this class into its worker by name (`worker_extension_cls`). vLLM's own reload misses the packed copy of a
tied head (CPU), parameters that were not loaded, and keys and values that were cached under the old weights. Each gives
wrong log-probs without an error. `VllmEngine` resets the cache; this class handles the rest.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from trimtab.trainer.engines.weight_transfer import Entry, SharedWeights, read_weights


class WeightLoading:
    """The mixin of a vLLM worker; `self.model_runner` is the worker's."""

    model_runner: Any

    def load_published(self, path: str, entries: list[Entry] | None = None) -> list[str]:
        """Loads all weights from the file `path`, under the names of the checkpoint.

        It is the file of `SharedWeights` with these entries or, with None, a safetensors file.

        Returns the names of parameters of vLLM's model that were not loaded; the caller must treat any as an error.
        """
        model = self.model_runner.get_model()
        expected = {name for name, _ in model.named_parameters()}
        loaded: set[str] = set()
        load = model.load_weights

        def load_and_record(weights: Iterable[tuple[str, Tensor]]) -> set[str]:
            loaded.update(load(weights))
            return loaded

        weights = read_weights(path) if entries is None else SharedWeights(os.open(path, os.O_RDONLY), entries)
        # The reload only logs which weights were not loaded and does not return their names.
        model.load_weights = load_and_record
        try:
            self.model_runner.reload_weights(weights_iterator=iter(weights), is_checkpoint_format=True)
        finally:
            del model.load_weights
        self._repack_tied_head(model)
        # Quantized layers have parameters that no checkpoint holds.
        return sorted(expected - loaded) if self.model_runner.model_config.quantization is None else []

    def _repack_tied_head(self, model: Any) -> None:
        """Packs the weight of a tied head again: on a CPU, heads pack it when they load; a tied head never loads."""
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm  # pyright: ignore[reportMissingImports]
        from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

        if current_platform.is_cpu() and getattr(model.config, "tie_word_embeddings", False):
            dispatch_cpu_unquantized_gemm(model.lm_head, remove_weight=False)
