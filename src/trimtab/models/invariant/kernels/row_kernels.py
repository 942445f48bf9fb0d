"""Batch-invariant RMSNorm and SiLU in Triton.

The product with the gate and rotary positions need no kernel: PyTorch computes them by single products and sums, each
of which is correctly rounded.
"""

from __future__ import annotations

from typing import no_type_check

import torch
from jaxtyping import Float
from torch import Tensor

from trimtab.models.invariant.kernels.runtime import (
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
WARPS = 4


def rms_norm(
    states: Float[Tensor, "*batch width"], weight: Float[Tensor, " width"], epsilon: float
) -> Float[Tensor, "*batch width"]:
    """Returns `weight * states / sqrt(mean(states^2) + epsilon)` over the last dimension, in float32. No gradient.

    One program computes one row; its sum of squares is one reduction of a block whose size depends on the width alone.
    (vLLM's kernel chose the size of its thread block by the number of rows, so its bits depended on the batch:
    vllm-project/vllm#48391.)
    """
    check_operands(states)
    check_operands(weight)
    width = states.shape[-1]
    rows = as_aligned(states)
    out = torch.empty_like(rows, dtype=torch.float32)
    if rows.numel():
        grid = (rows.numel() // width,)
        _rms_norm[grid](rows, as_aligned(weight), out, width, epsilon, power_of_2(width), num_warps=WARPS, **LAUNCH)
    return out


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
