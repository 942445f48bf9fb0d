"""Batch-invariant matrix products in Triton."""

from __future__ import annotations

from typing import NamedTuple, no_type_check

import torch
from jaxtyping import Float
from torch import Tensor

from trimtab.models.invariant.kernels.runtime import LAUNCH, aligned, interpreted, jit, parts, require, tl


class Tile(NamedTuple):
    """Rows and columns one program computes, how much of the sum it takes at once, and how it is compiled."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


# 64 rows are the fewest for Hopper's own instruction, and what a decoding batch wastes of them reads nothing. float32
# is computed outside of tensor cores, so its tile must leave registers free.
TILES = {torch.bfloat16: Tile(64, 128, 64, warps=4, stages=3), torch.float32: Tile(32, 64, 32, warps=4, stages=2)}
# Tiles of rows that one column of the weight is kept in cache for: programs in this order, the same numbers.
GROUP = 8


def product(a: Float[Tensor, "m k"], b: Float[Tensor, "n k"]) -> Float[Tensor, "m n"]:
    """`a @ b.T` in their type, summed in float32. No gradient. bfloat16 or float32, on CUDA.

    A row's bits depend on that row and `b` alone: the tile's shape depends on the type only, one program computes an
    element, and it adds tiles of k in order, from the first (a sum split over programs would be faster for few rows).
    Inside a tile the order is the tensor core's, which is the same for every row of the tile: that is the hardware's
    property, which benchmarks/invariant_cuda.py checks. Rows past the end are zeros and nothing but their own results
    depends on them.

    After the analysis in "Defeating nondeterminism in LLM inference" (Thinking Machines Lab 2025). Tiles of other
    heights for few rows (as vllm-project/vllm#49131 proposes) can be faster, and are other instructions.
    """
    dtype = require(a, b)
    a, b = aligned(a), aligned(b)
    rows, columns = len(a), len(b)
    out = torch.empty(rows, columns, dtype=dtype, device=a.device)
    if rows and columns:
        tile = TILES[dtype]
        grid = (parts(rows, tile.rows) * parts(columns, tile.columns),)
        _product[grid](
            *(a, b, out, rows, columns, a.shape[1]),
            *(tile.rows, tile.columns, tile.depth, GROUP, interpreted()),
            num_warps=tile.warps,
            num_stages=tile.stages,
            **LAUNCH,
        )
    return out


@jit(do_not_specialize=["rows"])
@no_type_check
def _product(
    a,
    b,
    out,
    rows,
    columns,
    depth,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    WIDEN: tl.constexpr,
):
    program = tl.program_id(0)
    across = tl.cdiv(columns, COLUMNS)
    band = program // (GROUP * across)
    height = tl.minimum(tl.cdiv(rows, ROWS) - band * GROUP, GROUP)
    within = program % (GROUP * across)
    # 64 bits: a batch's logits can be more numbers than 32 can count.
    row = ((band * GROUP + within % height) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = ((within // height) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    place = tl.arange(0, DEPTH)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, depth, DEPTH):
        inside = start + place < depth
        left = tl.load(
            a + row[:, None] * depth + (start + place)[None, :],
            mask=(row < rows)[:, None] & inside[None, :],
            other=0.0,
        )
        right = tl.load(
            b + column[:, None] * depth + (start + place)[None, :],
            mask=(column < columns)[:, None] & inside[None, :],
            other=0.0,
        )
        if WIDEN:
            left = left.to(tl.float32)
            right = right.to(tl.float32)
        total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
    kept = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(out + row[:, None] * columns + column[None, :], total.to(out.dtype.element_ty), mask=kept)
