"""Operations on rows and on single numbers: RMSNorm, the SiLU gate, rotary positions."""

from __future__ import annotations

from typing import no_type_check

import torch
from jaxtyping import Float
from torch import Tensor

from trimtab.errors import TrimtabError
from trimtab.models.invariant.triton_runtime import LAUNCH, aligned, jit, parts, power_of_2, require, tl

# Numbers of one program of the gate.
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
    if weight.shape != (width,):
        raise TrimtabError(f"norm of rows of {width} numbers with a weight of shape {tuple(weight.shape)}")
    rows = aligned(states)
    out = torch.empty_like(rows, dtype=torch.float32)
    if rows.numel():
        grid = (rows.numel() // width,)
        _rms_norm[grid](rows, aligned(weight), out, width, epsilon, power_of_2(width), num_warps=WARPS, **LAUNCH)
    return out


def silu_gate(gate: Float[Tensor, "*batch width"], up: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
    """`silu(gate) * up`, number by number. No gradient.

    In float32, with silu rounded to its type before the product, as transformers does. No number reads another, and
    one compiled variant serves every count.
    """
    dtype = require(gate, up)
    if gate.shape != up.shape:
        raise TrimtabError(f"gate of shape {tuple(gate.shape)} for values of shape {tuple(up.shape)}")
    gate, up = aligned(gate), aligned(up)
    out = torch.empty_like(gate, dtype=dtype)
    if out.numel():
        _silu_gate[(parts(out.numel(), BLOCK),)](gate, up, out, out.numel(), BLOCK, num_warps=WARPS, **LAUNCH)
    return out


def rotary(
    states: Float[Tensor, "tokens heads width"], cos: Float[Tensor, "tokens width"], sin: Float[Tensor, "tokens width"]
) -> Float[Tensor, "tokens heads width"]:
    """`states * cos + rotate_half(states) * sin` with each token's own rows of the table, in float32. No gradient.

    No number reads more than its pair and their angles. The table is the caller's: a table
    computed by a matrix product must not take one that depends on the number of positions, nor TF32.
    """
    require(states)
    require(cos, sin)
    tokens, heads, width = states.shape
    if cos.shape != (tokens, width) or sin.shape != (tokens, width) or width % 2:
        raise TrimtabError(f"rotary table of shape {tuple(cos.shape)} for states of shape {tuple(states.shape)}")
    states, cos, sin = aligned(states), aligned(cos), aligned(sin)
    out = torch.empty_like(states, dtype=torch.float32)
    if out.numel():
        half = width // 2
        sizes = (heads, half, power_of_2(heads), power_of_2(half))
        _rotary[(tokens,)](states, cos, sin, out, *sizes, num_warps=WARPS, **LAUNCH)
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
def _silu_gate(gate, up, out, count, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    value = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
    opened = (value / (1.0 + tl.exp(-value))).to(out.dtype.element_ty).to(tl.float32)
    passed = opened * tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, passed.to(out.dtype.element_ty), mask=inside)


@jit()
@no_type_check
def _rotary(states, cos, sin, out, heads, half, HEADS: tl.constexpr, HALF: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, HALF)
    head = tl.arange(0, HEADS)
    angle = token * 2 * half + place
    inside = place < half
    cos_low = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)[None, :]
    cos_high = tl.load(cos + angle + half, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin_low = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin_high = tl.load(sin + angle + half, mask=inside, other=0.0).to(tl.float32)[None, :]
    where = (token * heads + head)[:, None] * 2 * half + place[None, :]
    kept = (head < heads)[:, None] & inside[None, :]
    low = tl.load(states + where, mask=kept, other=0.0).to(tl.float32)
    high = tl.load(states + where + half, mask=kept, other=0.0).to(tl.float32)
    tl.store(out + where, low * cos_low - high * sin_low, mask=kept)
    tl.store(out + where + half, high * cos_high + low * sin_high, mask=kept)
