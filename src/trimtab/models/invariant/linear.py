"""Batch-invariant matrix products: each row has the same bits whatever the number of rows.

A product sums over its inner dimension in an order that its kernel chooses by the shape of its operands. Which row
counts share an order differs by processor: every multiple of four on AMD's, few on Intel's with AMX
(`benchmarks/invariant_rows.py`). So every product has the same number of rows (`products.TILE`), the last one padded.
On CUDA a kernel of our own has one order (`triton_product`).
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from trimtab.models.invariant.kernels.device import uses_kernels
from trimtab.models.matmul import TILE, padded, tiled_linear, tiled_product


def computing(weight: Tensor) -> torch.dtype:
    """The type products are computed in: autocast's where it is on, else the weights' own."""
    device = weight.device.type
    if torch.is_autocast_enabled(device) and weight.dtype == torch.float32:
        return torch.get_autocast_dtype(device)
    return weight.dtype


def rows_product(a: Float[Tensor, "m k"], b: Float[Tensor, "n k"]) -> Float[Tensor, "m n"]:
    """`a @ b.T`, each row with the same bits whatever the others. No gradient of its own."""
    if uses_kernels(a):
        from trimtab.models.invariant.kernels import matmul_kernel

        return matmul_kernel.product(a, b)
    return tiled_product(padded(a, TILE), b)[: len(a)]


def _linear(states: Float[Tensor, "*batch k"], weight: Float[Tensor, "n k"]) -> Float[Tensor, "*batch n"]:
    if uses_kernels(states):
        from trimtab.models.invariant.kernels import autograd

        return autograd.linear(states, weight)
    return tiled_linear(states, weight)


class InvariantLinear(nn.Linear):
    """`nn.Linear` through products of a fixed number of rows, weights rounded to `computing`'s type."""

    def forward(self, input: Tensor) -> Tensor:
        dtype = computing(self.weight)
        if torch.is_autocast_enabled(input.device.type):
            with torch.autocast(input.device.type, enabled=False):
                return self._compute(input, dtype)
        return self._compute(input, dtype)

    def _compute(self, input: Tensor, dtype: torch.dtype) -> Tensor:
        result = _linear(input.to(dtype), self.weight.to(dtype))
        return result if self.bias is None else result + self.bias.to(dtype)


class InvariantEmbedding(nn.Embedding):
    """`nn.Embedding` with rows rounded to `computing`'s type. The residual stream it begins is float32 or wider."""

    def forward(self, input: Tensor) -> Tensor:
        rows = super().forward(input).to(computing(self.weight))
        return rows.to(torch.promote_types(rows.dtype, torch.float32))
