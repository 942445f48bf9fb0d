"""Batch-invariant matrix products in Triton."""

from __future__ import annotations

from typing import NamedTuple, no_type_check

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
    tl,
)


class Tile(NamedTuple):
    """Rows and columns that one program computes, the depth of one summand, and the compilation options."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


# Hopper's matrix instruction needs at least 64 rows; the unused rows of a small decoding batch read no memory. float32
# is computed outside of tensor cores, so its tile is smaller to fit the registers.
TILES = {torch.bfloat16: Tile(64, 128, 64, warps=4, stages=3), torch.float32: Tile(32, 64, 32, warps=4, stages=2)}
# Tiles of rows that share one column of the weight in cache. It orders programs and changes no numbers.
GROUP = 8


def batch_invariant_matmul(a: Float[Tensor, "m k"], b: Float[Tensor, "n k"]) -> Float[Tensor, "m n"]:
    """Returns `a @ b.T` in their dtype (bfloat16 or float32, on CUDA), summed in float32. It has no gradient.

    A row's bits depend on that row and `b` alone: the shape of a tile depends on the dtype alone, and one program
    computes an element and adds the tiles of k in order (splitting the sum would be faster for few rows). Inside a tile
    the order is that of the tensor core, which is the same for every row of the tile: a property of the hardware, which
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
    # 64 bits: a batch may have more logits than 32 bits can index.
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
