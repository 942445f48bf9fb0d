"""Matrix products through the fastest exact kernel available."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

# PyTorch sends float32 products on a CPU to MKL, which is 2.2 to 2.5 times slower than oneDNN on AMD processors
# (both are exact float32). Builds without oneDNN have no such operator.
TILE = 64
"""Rows of one product where bits must not depend on the number of rows."""

_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def product(a: Float[Tensor, "m k"], b: Float[Tensor, "n k"]) -> Float[Tensor, "m n"]:
    """`a @ b.T`. Either may be a transposed view. No gradient of its own: call it inside an autograd function."""
    if _ONEDNN and a.dtype == torch.float32 and a.device.type == "cpu" and min(*a.shape, *b.shape) > 0:
        return torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")
    return a @ b.T


def tiled_product(a: Float[Tensor, "m k"], b: Float[Tensor, "n k"]) -> Float[Tensor, "m n"]:
    """`a @ b.T` from products of `TILE` rows each. A row's bits then depend on no other row and on no row count.

    `m` is a multiple of `TILE`. No gradient of its own.
    """
    tiles = [product(tile, b) for tile in a.split(TILE)]
    return tiles[0] if len(tiles) == 1 else torch.cat(tiles)


class Linear(nn.Linear):
    """`nn.Linear` whose float32 products on a CPU, forward and backward, go through `product`."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def use_in(blocks: nn.Module) -> None:
    """Let every `nn.Linear` inside compute as `Linear`; parameters, names and hooks stay as they are."""
    for module in blocks.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear


def linear(
    states: Float[Tensor, "*batch k"], weight: Float[Tensor, "n k"], bias: Float[Tensor, " n"] | None = None
) -> Float[Tensor, "*batch n"]:
    """`states @ weight.T + bias` with its gradient. Autocast and other types than float32 are left to PyTorch."""
    plain = states.dtype == weight.dtype == torch.float32 and not torch.is_autocast_enabled(states.device.type)
    if not (_ONEDNN and plain and states.device.type == "cpu"):
        return F.linear(states, weight, bias)
    result = padded_linear(states, weight)
    return result if bias is None else result + bias


def padded_linear(states: Float[Tensor, "*batch k"], weight: Float[Tensor, "n k"]) -> Float[Tensor, "*batch n"]:
    """`states @ weight.T` with its gradient, rows padded as in `padded`. Both have one type."""
    result: Any = _Product.apply(states, weight, False)
    return result


def tiled_linear(states: Float[Tensor, "*batch k"], weight: Float[Tensor, "n k"]) -> Float[Tensor, "*batch n"]:
    """`states @ weight.T` with its gradient, computed as in `tiled_product`. Both have one type."""
    if not torch.is_grad_enabled():  # a decoded token takes hundreds of products: a bare one has half the overhead
        return _unpadded(tiled_product(padded(states, TILE), weight), states.shape)
    result: Any = _Product.apply(states, weight, True)
    return result


def _unpadded(rows: Tensor, shape: torch.Size) -> Tensor:
    return rows[: shape[:-1].numel()].view(*shape[:-1], rows.shape[1])


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, tiled: bool) -> Tensor:
        rows = padded(states, TILE if tiled else 16)
        ctx.save_for_backward(rows, weight)
        ctx.shape = states.shape
        return _unpadded(tiled_product(rows, weight) if tiled else product(rows, weight), states.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, weight = ctx.saved_tensors
        grad = _filled(grads[0].reshape(-1, grads[0].shape[-1]), len(rows))
        to_states = _unpadded(product(grad, weight.T), ctx.shape) if ctx.needs_input_grad[0] else None
        to_weight = product(grad.T, rows.T) if ctx.needs_input_grad[1] else None
        return to_states, to_weight, None


def padded(states: Float[Tensor, "*batch k"], multiple: int = 16) -> Float[Tensor, "rows k"]:
    """The rows, and rows of zeros as `missing` counts them."""
    rows = states.reshape(-1, states.shape[-1])
    return _filled(rows, len(rows) + missing(len(rows), multiple))


def _filled(rows: Tensor, count: int) -> Tensor:
    more = count - len(rows)
    return F.pad(rows, (0, 0, 0, more)) if more else rows  # padding with nothing copies


def missing(rows: int, multiple: int = 16) -> int:
    """How many rows there are up to one of eight counts an octave, all multiples of `multiple`, a power of two.

    oneDNN keeps compiled kernels for every shape it meets, about half a megabyte each; micro-batches of ever new sizes
    would grow a process by gigabytes.
    """
    return -rows % max(multiple, 1 << max(0, rows.bit_length() - 4))
