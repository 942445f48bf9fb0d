"""Matrix products through the fastest exact kernel available."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

TILE_ROWS = 64
"""Rows of one product if its bits must not depend on the number of rows."""
ROWS = (1024, 512, 256, 128, TILE_ROWS, 48, 32, 16)
"""Row counts to use if their products have the same bits as products of `TILE_ROWS` rows on this machine."""
MULTIPLE = 16
"""Row counts are padded to multiples of this number."""
_PROBED = 1 << 24  # elements of the largest weight that is probed, which takes as long as a few products

# PyTorch computes float32 products on a CPU with MKL, which is 2.2 to 2.5 times slower than oneDNN on AMD processors
# (both are exact float32). Builds without oneDNN lack this operator.
_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
# Without bfloat16 instructions a bfloat16 product of many rows takes ten times as long as the product in float32 with
# a rounded result. Both multiply exactly and add in float32. For fewer rows, converting the weights costs more.
_CONVERTED_ROWS = 8
_BFLOAT16 = _ONEDNN and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
_FAST_DTYPES = (torch.float32,) * _ONEDNN + (torch.bfloat16,) * _BFLOAT16


def product_dtype(values: Tensor) -> torch.dtype:
    """Returns the dtype for products of `values`: float32 if the CPU lacks bfloat16 instructions, else their own."""
    lacks = _BFLOAT16 and values.device.type == "cpu" and values.dtype == torch.bfloat16
    return torch.float32 if lacks else values.dtype


def on_accelerator(device: torch.device) -> bool:
    """Whether launching a kernel takes longer than a small computation, so that blocks should be large."""
    return device.type not in ("cpu", "meta")


def product(a: Float[Tensor, "m k"], b: Float[Tensor, "n k"]) -> Float[Tensor, "m n"]:
    """Returns `a @ b.T` without gradient; either may be a transposed view, and `b` packed (`packed_weight`)."""
    if b.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(a.to(b.dtype), b, None, "none", [], "").to(a.dtype)
    if a.device.type == "cpu" and a.dtype == b.dtype and a.dtype in _FAST_DTYPES and min(*a.shape, *b.shape) > 0:
        return torch.ops.mkldnn._linear_pointwise(a.float(), b.float(), None, "none", [], "").to(a.dtype)
    return a @ b.T


def batched_product(a: Float[Tensor, "batch m k"], b: Float[Tensor, "batch k n"]) -> Float[Tensor, "batch m n"]:
    """Returns `a @ b` in their dtype. It has no gradient."""
    dtype = product_dtype(a)
    return torch.bmm(a.to(dtype), b.to(dtype)).to(a.dtype)


def inference_linear(
    states: Float[Tensor, "rows k"], weight: Float[Tensor, "n k"], bias: Float[Tensor, " n"] | None
) -> Float[Tensor, "rows n"]:
    """Returns `states @ weight.T + bias` without gradient; the weight may be packed (`packed_weight`)."""
    if not weight.is_mkldnn:
        return fast_linear(states, weight, bias)
    result = product(states, weight)
    return result if bias is None else result + bias


def packed_weight(weight: Float[Tensor, "n k"], rows: int) -> Tensor:
    """Returns a copy in the layout that oneDNN multiplies fastest by about `rows` rows; without oneDNN the weight."""
    dtype = product_dtype(weight)
    if not (_ONEDNN and weight.device.type == "cpu" and dtype in (torch.float32, torch.bfloat16)):
        return weight
    return torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype), rows)


def packed_alike(weight: Float[Tensor, "n k"]) -> Tensor:
    """Returns the packed weight if it does not change the bits of `tiled_product` on this machine, else the weight."""
    packed = packed_weight(weight, TILE_ROWS)
    if not packed.is_mkldnn:
        return weight
    same = _shares_bits(TILE_ROWS, weight.shape, weight.dtype, "cpu", torch.get_num_threads(), is_packed=True)
    return packed if same else weight


def tiled_product(a: Float[Tensor, "m k"], b: Float[Tensor, "n k"]) -> Float[Tensor, "m n"]:
    """Returns `a @ b.T`; a row has the same bits as in a product of `TILE_ROWS` rows, whatever the other rows.

    `b` may be packed by `packed_alike`. It has no gradient.
    """
    parts, done = [], 0
    key = (b.shape, a.dtype, b.device.type, torch.get_num_threads(), b.is_mkldnn)
    while done < len(a) or not parts:
        fitting = (*(rows for rows in ROWS if rows <= len(a) - done), TILE_ROWS)
        rows = next((rows for rows in fitting if _shares_bits(rows, *key)), 0)
        assert rows, "the number of threads has changed since the weight was packed"
        part = a[done : done + rows]
        parts.append(product(_pad_to(part, rows), b)[: len(part)])
        done += rows
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@cache
def _shares_bits(
    rows: int,
    shape: torch.Size,
    dtype: torch.dtype,
    device: str,
    threads: int,  # noqa: ARG001  # decides, among others, which kernel runs
    is_packed: bool,
) -> bool:
    """Whether products of `rows` rows with a weight of this shape have the same bits as products of `TILE_ROWS` rows.

    Compares products of random numbers whose sums cancel, so that only rounding errors are left; another order of a sum
    changes nearly all of these. Without cancellation, rounding to bfloat16 often hides them.
    """
    if device != "cpu" or shape.numel() > _PROBED or (rows == TILE_ROWS and not is_packed):
        return rows == TILE_ROWS and not is_packed
    generator = torch.Generator().manual_seed(0)
    n, k = shape
    a, b = (torch.randn(count, k // 2, generator=generator) for count in (max(rows, TILE_ROWS), n))
    a, b = (F.pad(x, (0, k % 2)).to(dtype) for x in (torch.cat([a, -a], 1), torch.cat([b, b], 1)))
    expected = torch.cat([product(part, b) for part in a.split(TILE_ROWS)])
    return torch.equal(product(a[:rows], packed_weight(b, TILE_ROWS) if is_packed else b), expected[:rows])


# id(weight) -> (weight, its cast). Holding the weight prevents another object from getting its id.
_casts: ContextVar[dict[int, tuple[Tensor, Tensor]] | None] = ContextVar("casts", default=None)


@contextmanager
def reused_casts() -> Iterator[None]:
    """Makes `FastLinear` round each weight once inside, not once per micro-batch. Weights must not change inside."""
    token = _casts.set({})
    try:
        yield
    finally:
        _casts.reset(token)


def cast_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `weight.to(dtype)` with its gradient, the same tensor for every call inside `reused_casts`."""
    casts = None if torch.compiler.is_compiling() else _casts.get()  # a compiler has no context variables
    if casts is None or weight.dtype == dtype:
        return weight.to(dtype)
    if id(weight) not in casts:
        if not torch.is_grad_enabled():  # a cast without gradient must not be kept for passes with gradient
            return weight.to(dtype)
        casts[id(weight)] = (weight, weight.to(dtype))
    return casts[id(weight)][1]


class FastLinear(nn.Linear):
    """`nn.Linear` whose products on a CPU, forward and backward, go through `product`."""

    def forward(self, input: Tensor) -> Tensor:
        return fast_linear(input, self.weight, self.bias)


def use_fast_linear(blocks: nn.Module) -> None:
    """Changes every `nn.Linear` inside to `FastLinear`; parameters, names and hooks are unchanged."""
    for module in blocks.modules():
        if type(module) is nn.Linear:
            module.__class__ = FastLinear


def fast_linear(
    states: Float[Tensor, "*batch k"], weight: Float[Tensor, "n k"], bias: Float[Tensor, " n"] | None = None
) -> Float[Tensor, "*batch n"]:
    """Returns `states @ weight.T + bias` with gradient, in the dtype that `F.linear` computes in."""
    device = states.device.type
    cast = torch.is_autocast_enabled(device) and states.dtype != torch.float64
    dtype = torch.get_autocast_dtype(device) if cast else states.dtype
    few = dtype == torch.bfloat16 and states.numel() < _CONVERTED_ROWS * states.shape[-1]
    if cast:
        weight, bias = cast_weight(weight, dtype), None if bias is None else cast_weight(bias, dtype)
    others = few or dtype not in _FAST_DTYPES or weight.dtype != dtype
    if device != "cpu" or others or torch.compiler.is_compiling():
        return F.linear(states, weight, bias)
    result = linear_by(product, states.to(dtype), weight, MULTIPLE)
    return result if bias is None else result + bias.to(dtype)


def tiled_linear(states: Float[Tensor, "*batch k"], weight: Float[Tensor, "n k"]) -> Float[Tensor, "*batch n"]:
    """Returns `states @ weight.T` with gradient, computed by `tiled_product`. States and weight have the same dtype."""
    if not torch.is_grad_enabled():  # decoding needs hundreds of products per token; this path halves the overhead
        return _unpadded(tiled_product(pad_rows(states, MULTIPLE), weight), states.shape)
    return linear_by(tiled_product, states, weight, MULTIPLE)


def linear_by(
    multiply: Callable[[Tensor, Tensor], Tensor],
    states: Float[Tensor, "*batch k"],
    weight: Float[Tensor, "n k"],
    multiple: int | None,
) -> Float[Tensor, "*batch n"]:
    """Returns `states @ weight.T` with gradient, by `multiply`. `pad_rows` pads states unless `multiple` is None.

    States and weight have one dtype. The backward is the same for every `multiply`: only the trainer needs gradients.
    """
    return _Product.apply(states, weight, multiply, multiple)


def _unpadded(rows: Tensor, shape: torch.Size) -> Tensor:
    return rows[: shape[:-1].numel()].view(*shape[:-1], rows.shape[1])


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, multiply: Callable[[Tensor, Tensor], Tensor], multiple: int | None
    ) -> Tensor:
        rows = states.reshape(-1, states.shape[-1]) if multiple is None else pad_rows(states, multiple)
        ctx.save_for_backward(rows, weight)
        ctx.shape = states.shape
        return _unpadded(multiply(rows, weight), states.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        grad = _pad_to(grads[0].reshape(-1, grads[0].shape[-1]), len(rows))
        to_states = _unpadded(product(grad, weight.T), ctx.shape) if ctx.needs_input_grad[0] else None
        to_weight = product(grad.T, rows.T) if ctx.needs_input_grad[1] else None
        return to_states, to_weight, None, None


def pad_rows(states: Float[Tensor, "*batch k"], multiple: int) -> Float[Tensor, "rows k"]:
    """Returns the rows, followed by `padding_rows` rows of zeros."""
    rows = states.reshape(-1, states.shape[-1])
    return _pad_to(rows, len(rows) + padding_rows(len(rows), multiple))


def _pad_to(rows: Tensor, count: int) -> Tensor:
    missing = count - len(rows)
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows  # F.pad copies even without padding


def padding_rows(rows: int, multiple: int) -> int:
    """Returns the number of rows to add to reach the next of eight sizes per power of two.

    All sizes are multiples of `multiple`, a power of two. oneDNN caches compiled kernels for every shape, about half a
    megabyte each; micro-batches of ever new sizes would grow a process by gigabytes.
    """
    return -rows % max(multiple, 1 << max(0, rows.bit_length() - 4))
