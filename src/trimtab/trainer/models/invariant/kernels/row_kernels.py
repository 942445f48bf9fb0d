"""Batch-invariant operations on rows in Triton: RMSNorm, SiLU, and the sum of exponentials of logits.

The product with the gate and rotary positions need no kernel: PyTorch computes them by single products and sums, each
of which is correctly rounded.
"""

from __future__ import annotations

from typing import Any, no_type_check

import torch
from jaxtyping import Float
from torch import Tensor

from trimtab.trainer.models.invariant.kernels import (
    LAUNCH,
    as_aligned,
    ceil_divide,
    check_operands,
    jit,
    power_of_2,
    tl,
)

# Elements of one program of SiLU.
BLOCK = 1024
# Vocabulary entries of one tile. Fixed, because the order of the sum is that of the tiles.
WORDS = 1024
# Rows of one program that sums tiles.
ROWS = 64
WARPS = 4


def rms_norm(
    states: Float[Tensor, "*batch width"], weight: Float[Tensor, " width"], epsilon: float
) -> Float[Tensor, "*batch width"]:
    """Returns `weight * states / sqrt(mean(states^2) + epsilon)` over the last dimension, in float32, with gradient.

    One program computes one row; its sum of squares is one reduction of a block whose size depends on the width alone.
    (vLLM's kernel chose the size of its thread block by the number of rows, so its bits depended on the batch:
    vllm-project/vllm#48391.) The backward is PyTorch's: only the trainer computes gradients, which need not be
    invariant.
    """
    result: Any = _RMSNorm.apply(states, weight, epsilon)
    return result


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        ctx.save_for_backward(states, weight)
        ctx.epsilon = epsilon
        check_operands(states)
        check_operands(weight)
        width = states.shape[-1]
        rows = as_aligned(states)
        out = torch.empty_like(rows, dtype=torch.float32)
        if rows.numel():
            grid = (rows.numel() // width,)
            _rms_norm[grid](rows, as_aligned(weight), out, width, epsilon, power_of_2(width), num_warps=WARPS, **LAUNCH)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        states, weight = ctx.saved_tensors
        scale = (states.float().square().mean(-1, keepdim=True) + ctx.epsilon).rsqrt()
        normal = states.float() * scale
        inner = grads[0] * weight.float()
        to_states = scale * (inner - normal * (inner * normal).mean(-1, keepdim=True))
        to_weight = (grads[0] * normal).flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return to_states.to(states.dtype), to_weight, None


def silu(states: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
    """Returns `states / (1 + exp(-states))`, computed in float32 and rounded once. It has no gradient.

    One compiled variant computes all elements, whatever their number; PyTorch's kernels compute the last block by other
    code.
    """
    dtype = check_operands(states)
    states = as_aligned(states)
    out = torch.empty_like(states, dtype=dtype)
    if out.numel():
        _silu[(ceil_divide(out.numel(), BLOCK),)](states, out, out.numel(), BLOCK, num_warps=WARPS, **LAUNCH)
    return out


def add_exponentials(
    total: Float[Tensor, " tokens"], logits: Float[Tensor, "tokens words"]
) -> Float[Tensor, " tokens"]:
    """Returns `logaddexp(total, logsumexp(logits))` of each row in float32. It has no gradient.

    For a head that splits the vocabulary; its parts must start at the same entries in sampler and trainer. One program
    reads one row's tile of `WORDS` entries and stores its maximum and its sum relative to the maximum. Then the tiles
    are added in order, after `total`. One program for a whole row would leave a GPU idle in decoding. (Splitting a row
    over programs by its width alone: vllm-project/vllm#49367.) Entries of -inf change nothing.
    """
    check_operands(total, logits)
    tokens, words = logits.shape
    tiles = ceil_divide(words, WORDS)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    # The previous sum is an additional first tile: its maximum, and a sum of 1 relative to it.
    parts = total.new_empty(tiles, tokens)
    largest, sums = torch.cat([total[None], parts]), torch.cat([torch.ones_like(total)[None], parts])
    out = torch.empty_like(total)
    if tokens:
        _tiles[(tokens, tiles)](
            logits, largest[1:], sums[1:], tokens, words, logits.stride(0), WORDS, num_warps=WARPS, **LAUNCH
        )
        _rows[(ceil_divide(tokens, ROWS),)](
            largest, sums, out, tokens, tiles + 1, ROWS, num_warps=power_of_2(ROWS // 32), **LAUNCH
        )
    return out


@jit()
@no_type_check
def _rms_norm(states, weight, out, width, epsilon, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(states + row * width + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / width + epsilon)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, value * scale * factor, mask=inside)


@jit(do_not_specialize=["count"])
@no_type_check
def _silu(states, out, count, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    value = tl.load(states + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, (value / (1.0 + tl.exp(-value))).to(out.dtype.element_ty), mask=inside)


# Logits have any address and stride; a variant for aligned ones would sum in another order.
@jit(do_not_specialize=["tokens", "words", "distance"], do_not_specialize_on_alignment=["logits", "largest", "total"])
@no_type_check
def _tiles(logits, largest, total, tokens, words, distance, WORDS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1).to(tl.int64)
    word = tile * WORDS + tl.arange(0, WORDS)
    value = tl.load(logits + row * distance + word, mask=word < words, other=float("-inf")).to(tl.float32)
    top = tl.max(value, axis=0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    tl.store(largest + tile * tokens + row, top)
    tl.store(total + tile * tokens + row, tl.sum(tl.exp(value - shift), axis=0))


@jit(do_not_specialize=["tokens", "tiles"], do_not_specialize_on_alignment=["largest", "total", "out"])
@no_type_check
def _rows(largest, total, out, tokens, tiles, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < tokens
    top = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    for tile in range(0, tiles):
        top = tl.maximum(top, tl.load(largest + tile * tokens + row, mask=inside, other=0.0))
    shift = tl.where(top == float("-inf"), 0.0, top)
    added = tl.zeros((ROWS,), dtype=tl.float32)
    for tile in range(0, tiles):
        part = tl.load(total + tile * tokens + row, mask=inside, other=1.0)
        added += part * tl.exp(tl.load(largest + tile * tokens + row, mask=inside, other=0.0) - shift)
    tl.store(out + row, shift + tl.log(added), mask=inside)
