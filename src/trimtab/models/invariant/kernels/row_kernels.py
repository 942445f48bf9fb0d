"""RMSNorm and SiLU in Triton.

The gate's product and rotary positions need no kernel: PyTorch computes them as single products and sums, each rounded
once, which leaves a kernel no choice.
"""

from __future__ import annotations

from typing import no_type_check

import torch
from jaxtyping import Float
from torch import Tensor

from trimtab.models.invariant.kernels.runtime import LAUNCH, aligned, jit, parts, power_of_2, require, tl

# Numbers of one program of SiLU.
BLOCK = 1024
WARPS = 4


def rms_norm(
    states: Float[Tensor, "*batch width"], weight: Float[Tensor, " width"], epsilon: float
) -> Float[Tensor, "*batch width"]:
    """`weight * states / sqrt(mean(states^2) + epsilon)` over the last dimension, in float32. No gradient.

    One program computes one row, whose sum of squares is one reduction of a block that depends on the width alone. (A
    block of threads chosen from the number of rows made vLLM's kernel depend on the batch: vllm-project/vllm#48391.)
    """
    require(states)
    require(weight)
    width = states.shape[-1]
    rows = aligned(states)
    out = torch.empty_like(rows, dtype=torch.float32)
    if rows.numel():
        grid = (rows.numel() // width,)
        _rms_norm[grid](rows, aligned(weight), out, width, epsilon, power_of_2(width), num_warps=WARPS, **LAUNCH)
    return out


def silu(states: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
    """`states / (1 + exp(-states))`, number by number, in float32 and rounded once. No gradient.

    One compiled variant serves every count and place of a number; PyTorch's kernels treat the last block otherwise.
    """
    dtype = require(states)
    states = aligned(states)
    out = torch.empty_like(states, dtype=dtype)
    if out.numel():
        _silu[(parts(out.numel(), BLOCK),)](states, out, out.numel(), BLOCK, num_warps=WARPS, **LAUNCH)
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
