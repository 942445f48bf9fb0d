"""Batch-invariant operations on rows in Triton: products, RMSNorm, SiLU, and the sum of exponentials of logits.

The product with the gate and rotary positions need no kernel: PyTorch computes them by single products and sums, each
of which is correctly rounded.
"""

from __future__ import annotations

from typing import Any, NamedTuple, no_type_check

import torch
from jaxtyping import Float
from torch import Tensor

from trimtab.trainer.models.invariant.kernels import (
    LAUNCH,
    as_aligned,
    ceil_divide,
    check_operands,
    is_interpreted,
    jit,
    power_of_2,
    tl,
)


class Tile(NamedTuple):
    """Rows and columns that one program computes, the inner dimension of one product, and compilation options."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


# Hopper's matrix instruction needs at least 64 rows; the unused rows of a small decoding batch read no memory. float32
# is computed outside of tensor cores, so its tile is smaller to fit the registers.
TILES = {torch.bfloat16: Tile(64, 128, 64, warps=4, stages=3), torch.float32: Tile(32, 64, 32, warps=4, stages=2)}
# Tiles of rows that share one column of the weight in cache. It changes the order of programs, but no numbers.
GROUP = 8
# Elements of one program of SiLU.
BLOCK = 1024
# Vocabulary entries of one tile. Fixed, because it determines the order of the sum.
WORDS = 1024
# Rows of one program that sums tiles.
ROWS = 64
WARPS = 4


def batch_invariant_matmul(a: Float[Tensor, "m k"], b: Float[Tensor, "n k"]) -> Float[Tensor, "m n"]:
    """Returns `a @ b.T` in their dtype (bfloat16 or float32, on CUDA), summed in float32. It has no gradient.

    A row's bits depend on that row and `b` alone: the shape of a tile depends on the dtype alone, and one program
    computes an element and adds the tiles of k in order (splitting the sum would be faster for few rows). Inside a tile
    the tensor core determines the order, the same for every row of the tile: a property of the hardware, which
    benchmarks/invariant_cuda.py checks. Rows past the end are zeros and do not affect other rows.

    After the analysis in "Defeating nondeterminism in LLM inference" (Thinking Machines Lab 2025). Tiles of fewer rows
    (as vllm-project/vllm#49131 proposes) can be faster, but use other instructions.
    """
    dtype = check_operands(a, b)
    a, b = as_aligned(a), as_aligned(b)
    rows, columns = len(a), len(b)
    out = torch.empty(rows, columns, dtype=dtype, device=a.device)
    if rows and columns:
        tile = TILES[dtype]
        grid = (ceil_divide(rows, tile.rows) * ceil_divide(columns, tile.columns),)
        _product[grid](
            *(a, b, out, rows, columns, a.shape[1]),
            *(tile.rows, tile.columns, tile.depth, GROUP, is_interpreted()),
            num_warps=tile.warps,
            num_stages=tile.stages,
            **LAUNCH,
        )
    return out


def rms_norm(
    states: Float[Tensor, "*batch width"], weight: Float[Tensor, " width"], epsilon: float
) -> Float[Tensor, "*batch width"]:
    """Returns `weight * states / sqrt(mean(states^2) + epsilon)` over the last dimension, in float32, with gradient.

    One program computes one row; its sum of squares is one reduction of a block whose size depends on the width alone.
    (vLLM's kernel chose the size of its thread block by the number of rows, so its bits depended on the batch:
    vllm-project/vllm#48391.) The backward is PyTorch's: gradients, which only the trainer computes, may vary.
    """
    return _RMSNorm.apply(states, weight, epsilon)


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

    One compiled variant computes all elements, whatever their number; PyTorch has other code for the last block.
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


@jit(do_not_specialize=["rows"])
@no_type_check
def _product(
    a, b, out, rows, columns, depth,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    across = tl.cdiv(columns, COLUMNS)
    band = program // (GROUP * across)
    height = tl.minimum(tl.cdiv(rows, ROWS) - band * GROUP, GROUP)
    within = program % (GROUP * across)
    # 64 bits: a batch may have more logits than 32 bits can index.
    row = ((band * GROUP + within % height) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = ((within // height) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    place = tl.arange(0, DEPTH)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, depth, DEPTH):
        inside = start + place < depth
        where = (start + place)[None, :]
        left = tl.load(a + row[:, None] * depth + where, mask=(row < rows)[:, None] & inside[None, :], other=0.0)
        in_right = (column < columns)[:, None] & inside[None, :]
        right = tl.load(b + column[:, None] * depth + where, mask=in_right, other=0.0)
        if WIDEN:
            left = left.to(tl.float32)
            right = right.to(tl.float32)
        total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
    kept = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(out + row[:, None] * columns + column[None, :], total.to(out.dtype.element_ty), mask=kept)


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
