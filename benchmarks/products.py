"""The time of matrix products alone: those of a step, each as it was called, and of its update by one rate."""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PreTrainedConfig

from shared import alternate, medians
from trimtab.trainer.models.fused_head import TILE_VOCABULARY
from trimtab.trainer.models.load import default_device
from trimtab.trainer.models.matmul import product

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "mkldnn::_linear_pointwise"}
KEPT = 30  # calls of one kind whose operands are kept: as many as SmolLM2 has layers, whose weights exceed the cache


class RecordedProducts(TorchDispatchMode):
    """Inside, records the operands of every matrix product that runs on a CPU, except inside fused attention."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self._inner, self._vocabulary = config.intermediate_size, config.vocab_size
        self._counts: Counter[Any] = Counter()
        self._calls: dict[Any, list[Any]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.name().removeprefix("aten::").split(".")[0] in PRODUCTS:
            operands = [x for x in args if isinstance(x, Tensor)]
            layouts = tuple((x.shape, "packed" if x.is_mkldnn else x.stride(), x.dtype) for x in operands)
            key = (self._kind(operands), func, layouts)
            self._counts[key] += 1
            if len(self._calls[key]) < KEPT:
                self._calls[key].append((args, kwargs))
            return func(*args, **kwargs)
        with self:  # an operator such as `linear` that others make up
            result = func.decompose(*args, **kwargs)
        return func(*args, **kwargs) if result is NotImplemented else result

    def _kind(self, operands: list[Tensor]) -> str:
        """Returns the part of the step and of the model; that of the model by sizes."""
        part = "sampling" if torch.is_inference_mode_enabled() else "update"
        if operands[0].dim() == 3:
            return f"{part}, attention"
        sizes = {size for x in operands for size in x.shape}
        if sizes & {self._inner, 2 * self._inner}:  # two of them are packed as one for sampling
            return f"{part}, feed-forward"
        return f"{part}, head" if sizes & {self._vocabulary, TILE_VOCABULARY} else f"{part}, projections"

    @torch.no_grad()
    def seconds(self, passes: int = 5) -> dict[str, float]:
        """Returns the seconds of all products by kind: each timed alone, times the number of its calls.

        The first operand of a kind is the same in all calls, and so in cache if it fits; the others differ, as the
        weights of layers do.
        """
        result: dict[str, float] = defaultdict(float)
        for key, calls in self._calls.items():
            median = medians(alternate({"": partial(_multiply, key[1], calls)}, passes))[""]
            result[key[0]] += median / len(calls) * self._counts[key]
        return result


def _multiply(function: Any, calls: list[Any]) -> None:
    for args, kwargs in calls:
        function(calls[0][0][0], *args[1:], **kwargs)


def products_alone(model: str, rows: int) -> tuple[float, float]:
    """Returns the rate of products here (GFLOP/s), in bfloat16 where the device multiplies it, else in float32.

    Also the seconds that the products of an update on `rows` tokens take at this rate.
    """
    loaded = AutoModelForCausalLM.from_pretrained(model)
    width, inner = loaded.config.hidden_size, loaded.config.intermediate_size
    dtype = torch.bfloat16 if has_bfloat16() else torch.float32
    device = default_device()
    states, weight = (torch.randn(size, width, dtype=dtype, device=device) for size in (rows, inner))
    median = medians(alternate({"": lambda: float(product(states, weight)[0, 0])}, 6))[""]
    rate = 2 * rows * width * inner / median
    parameters = sum(parameter.numel() for parameter in loaded.parameters())
    return rate / 1e9, 6 * parameters * rows / rate  # forward, and both products of backward


def has_bfloat16() -> bool:
    """Whether the device multiplies bfloat16 in hardware."""
    return torch.cuda.is_available() or torch.ops.mkldnn._is_mkldnn_bf16_supported()
