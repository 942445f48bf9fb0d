"""Rounds the weights of the trainer's forward as the sampler rounds its own (`model.quantized_forward`).

A policy that samples with rounded weights and trains without differs from itself. Here both round; the gradient passes
through the rounding as if it were none, to the exact weights, which the optimizer updates. QaRL, arXiv 2604.07853.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.errors import TrimtabError
from trimtab.trainer.config import Config
from trimtab.trainer.engines.embedded.weight_quantization import BITS, matrices, quantize
from trimtab.trainer.features.feature import Feature, ForwardPass
from trimtab.trainer.ranks import RankGroup


class QuantizedForward(Feature):
    """Rounds the weights of every forward of the policy, with and without gradient; not those of the reference.

    Raises `TrimtabError` with several ranks, whose weights are sharded.
    """

    def __init__(self, config: Config, model: nn.Module, ranks: RankGroup) -> None:
        bits = BITS[config.engine.quantize]
        assert bits is not None
        if ranks.size > 1:
            raise TrimtabError("model.quantized_forward needs whole matrices: leave it out, or start one process")
        self._bits, self._dtype = bits, getattr(torch, config.engine.dtype)
        names = [name.rpartition(".") for name in matrices(model)]
        self._places = [(model.get_submodule(module), leaf) for module, _, leaf in names]

    @contextmanager
    def forward(self, call: ForwardPass) -> Iterator[Mapping[str, Any]]:
        if call.purpose == "reference":
            yield {}
            return
        for module, leaf in self._places:
            # An attribute of the instance comes before the parameter of the same name, which stays registered.
            module.__dict__[leaf] = _Rounded.apply(getattr(module, leaf), self._bits, self._dtype)
        try:
            yield {}
        finally:
            for module, leaf in self._places:
                module.__dict__.pop(leaf, None)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, bits: int, dtype: torch.dtype) -> Tensor:  # noqa: ARG004
        return quantize(weight.to(dtype), bits).to(weight.dtype)  # the engine casts before it rounds

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ARG004
        return grads[0], None, None
