"""Batch-invariant attention in Triton: one kernel for packed rows and for decoding with a cache.

A query attends to keys of its prompt and of its response. Both are split into blocks of `KEY_BLOCK`, counted from
the first key of the prompt and of the response, as in `invariant_attention.py`. One program computes a tile of rows; a
row is a query of one head, and heads that share a key head are rows of one program. It iterates over the blocks twice:
for the maximum of each row's scores (exact in any order), and for the sum of exponentials and the weighted values,
which are added block by block in order, in float32.

A row's bits do not depend on the other rows, on the number of queries in a program, or on prefill or decoding:
- Scores, sums over a block and weighted values are computed on tiles of one shape; in decoding, a program's tile is
  padded with copies of its last query. (A kernel for single queries sums in another order:
  vllm-project/flash-attention#169.) All rows of a tile are computed alike; see `row_kernels.batch_invariant_matmul`.
- Keys that a row does not attend to have exponential 0 and add exactly 0, whether they belong to other queries
  (prefill) or do not exist yet (decoding). Values must be finite: 0 times infinity is NaN.
- Where a block starts depends on the text alone. Splitting the keys over programs by their number or by the batch size
  would change the order of the sum; splits of a fixed size (as in the article that `row_kernels` cites) or none at
  all, as here, do not. The cost is speed for long rows in small batches.
"""

from __future__ import annotations

from typing import NamedTuple, no_type_check

import torch
from jaxtyping import Float, Int
from torch import Tensor

from trimtab.errors import TrimtabError
from trimtab.trainer.models.invariant.kernels import (
    KEY_BLOCK,
    LAUNCH,
    as_aligned,
    ceil_divide,
    check_operands,
    is_interpreted,
    jit,
    power_of_2,
    tl,
)
from trimtab.trainer.models.packed_attention import PackedLayout, PaddedRows


class Tile(NamedTuple):
    """The number of rows of one program, and its compilation options."""

    queries: int
    warps: int
    stages: int


# By dtype alone. float32 is computed outside of tensor cores: with more rows its values would not fit the registers.
TILES = {torch.bfloat16: Tile(64, warps=4, stages=2), torch.float32: Tile(16, warps=4, stages=1)}


class StoredKeys(NamedTuple):
    """The keys and values of all sequences: sequence `i` starts at `key[row[i], :, first[i]]`."""

    key: Float[Tensor, "rows key_heads time width"]
    value: Float[Tensor, "rows key_heads time width"]
    row: Int[Tensor, " sequences"]
    first: Int[Tensor, " sequences"]


class QuerySpans(NamedTuple):
    """Consecutive queries of each sequence, and the number of keys that the first one attends to (at least its own).

    Each further query attends to one more key: of the response, or of the prompt if the first attends to no response.
    """

    first: Int[Tensor, " sequences"]  # index among all queries
    counts: Int[Tensor, " sequences"]
    prompt: Int[Tensor, " sequences"]  # keys of the prompt that the first query attends to
    response: Int[Tensor, " sequences"]
    longest: int  # the largest count, or an upper bound of it


def attend(
    query: Float[Tensor, "tokens heads width"],
    queries: QuerySpans,
    prompt: StoredKeys,
    response: StoredKeys,
    scaling: float,
) -> Float[Tensor, "tokens heads width"]:
    """Returns softmax(scaling * query . keys) @ values for each query and head, in bfloat16 or float32, on CUDA.

    It has no gradient. Exponentials are rounded to the dtype of the values before they are multiplied; sums and the
    quotient are float32. The result is 0 for queries that belong to no sequence. Prompt and response may be stored in
    one tensor or in two; in decoding every sequence has one query.
    """
    dtype = check_operands(query, prompt.key, prompt.value, response.key, response.value)
    _, heads, width = query.shape
    key_heads = prompt.key.shape[1]
    tile = TILES[dtype]
    if heads % key_heads or heads // key_heads > tile.queries:
        raise TrimtabError(
            f"{heads} heads over {key_heads} key heads; at most {tile.queries} may share one, equally many each"
        )
    if width % 8:
        raise TrimtabError(f"invariant attention on CUDA wants heads of a multiple of 8 numbers, got {width}")
    query = as_aligned(query)
    out = torch.zeros_like(query)
    group, sequences = heads // key_heads, len(queries.counts)
    tiles = ceil_divide(queries.longest, tile.queries // group)
    if sequences and tiles:
        _attend[(sequences * tiles, key_heads)](
            *(query, out, *(numbers.long().contiguous() for numbers in queries[:4])),
            *(*_stored(prompt.key, prompt), *_stored(prompt.value, prompt)),
            *(*_stored(response.key, response), *_stored(response.value, response)),
            *(tiles, scaling, width, group, key_heads),
            *(tile.queries, KEY_BLOCK, max(16, power_of_2(width)), is_interpreted()),
            num_warps=tile.warps,
            num_stages=tile.stages,
            **LAUNCH,
        )
    return out


def attend_packed(
    query: Float[Tensor, "tokens channels"],
    key: Float[Tensor, "tokens key_channels"],
    value: Float[Tensor, "tokens key_channels"],
    layout: PackedLayout,
    width: int,
    scaling: float,
) -> Float[Tensor, "tokens channels"]:
    """Returns `attend` over a packed micro-batch: prompts attend to themselves, responses also to their prompt."""
    prompts, index = layout.prompt_lengths.long(), layout.prompt_index
    responses = _lengths(layout.responses, query.device)
    one, zero = torch.ones_like(prompts), torch.zeros_like(responses)
    prompt_starts = layout.prompts.start + prompts.cumsum(0) - prompts
    starts = torch.cat([prompt_starts, layout.responses.start + responses.cumsum(0) - responses])
    spans = QuerySpans(
        first=starts,
        counts=torch.cat([prompts, responses]),
        prompt=torch.cat([one, prompts[index]]),
        response=torch.cat([one - 1, zero + 1]),
        longest=max(layout.prompts.width, layout.responses.width),
    )
    k, v = (x.view(1, len(query), -1, width).transpose(1, 2) for x in (key.contiguous(), value.contiguous()))
    row = torch.zeros_like(starts)
    shared = StoredKeys(k, v, row, torch.cat([prompt_starts, prompt_starts[index]]))
    return attend(query.view(len(query), -1, width), spans, shared, StoredKeys(k, v, row, starts), scaling).flatten(1)


def _lengths(rows: PaddedRows, device: torch.device) -> Int[Tensor, " rows"]:
    """Returns the number of tokens of each row, without synchronizing with the device."""
    if rows.slots is None:
        return torch.full((rows.batch,), rows.width, device=device)
    counts = torch.zeros(rows.batch, dtype=torch.int64, device=device)
    return counts.index_add_(0, rows.slots // rows.width, torch.ones_like(rows.slots))


def _stored(data: Tensor, keys: StoredKeys) -> tuple[Tensor, Int[Tensor, " sequences"], int, int]:
    """Returns a tensor, the start of each sequence in it, and the strides of heads and tokens, all in elements.

    The tensor is copied unless every row of a head is aligned, so that one kernel variant reads all tensors.
    """
    if data.stride(3) != 1 or data.data_ptr() % 16 or any(stride % 8 for stride in data.stride()[:3]):
        data = as_aligned(data)
    row, head, token, _ = data.stride()
    return data, keys.row.long() * row + keys.first * token, head, token


# One line for each group of arguments.
# fmt: off
@jit(
    do_not_specialize=[
        *("prompt_key_head", "prompt_key_token", "prompt_value_head", "prompt_value_token"),
        *("response_key_head", "response_key_token", "response_value_head", "response_value_token", "tiles"),
    ],
    do_not_specialize_on_alignment=[
        *("first_query", "query_count", "prompt_seen", "response_seen"),
        *("prompt_key_start", "prompt_value_start", "response_key_start", "response_value_start"),
    ],
)
@no_type_check
def _attend(
    query, out, first_query, query_count, prompt_seen, response_seen,
    prompt_key, prompt_key_start, prompt_key_head, prompt_key_token,
    prompt_value, prompt_value_start, prompt_value_head, prompt_value_token,
    response_key, response_key_start, response_key_head, response_key_token,
    response_value, response_value_start, response_value_head, response_value_token,
    tiles, scaling, width,
    GROUP: tl.constexpr, KEY_HEADS: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, WIDTH: tl.constexpr, WIDEN: tl.constexpr,
):
    sequence = tl.program_id(0) // tiles
    tokens = QUERIES // GROUP
    begin = (tl.program_id(0) % tiles) * tokens
    key_head = tl.program_id(1).to(tl.int64)
    count = tl.load(query_count + sequence)
    if begin < count:
        row = tl.arange(0, QUERIES)
        # Rows beyond the tile's tokens or the sequence's queries repeat its last query and are not stored.
        token = tl.minimum(begin + row // GROUP, count - 1)
        kept = (row < tokens * GROUP) & (begin + row // GROUP < count)
        head = key_head * GROUP + row % GROUP
        place = tl.arange(0, WIDTH)
        inside = place < width
        where = ((tl.load(first_query + sequence) + token) * (GROUP * KEY_HEADS) + head) * width
        rows = tl.load(query + where[:, None] + place[None, :], mask=inside[None, :], other=0.0)
        if WIDEN:
            rows = rows.to(tl.float32)
        base = tl.load(prompt_seen + sequence)
        own = tl.load(response_seen + sequence)
        seen_prompt, seen_response = _seen(base, own, token)
        keys_prompt, keys_response = _seen(base, own, tl.minimum(begin + tokens, count) - 1)
        from_key = _start(prompt_key, prompt_key_start + sequence, key_head * prompt_key_head)
        from_value = _start(prompt_value, prompt_value_start + sequence, key_head * prompt_value_head)
        own_key = _start(response_key, response_key_start + sequence, key_head * response_key_head)
        own_value = _start(response_value, response_value_start + sequence, key_head * response_value_head)

        top = tl.full((QUERIES,), float("-inf"), dtype=tl.float32)
        top = _highest(
            top, rows, from_key, prompt_key_token, keys_prompt, seen_prompt, scaling, width, KEYS, WIDTH, WIDEN
        )
        top = _highest(
            top, rows, own_key, response_key_token, keys_response, seen_response, scaling, width, KEYS, WIDTH, WIDEN
        )
        total = tl.zeros((QUERIES,), dtype=tl.float32)
        result = tl.zeros((QUERIES, WIDTH), dtype=tl.float32)
        total, result = _add(
            total, result, top, rows, from_key, prompt_key_token, from_value, prompt_value_token,
            keys_prompt, seen_prompt, scaling, width, KEYS, WIDTH, WIDEN,
        )
        total, result = _add(
            total, result, top, rows, own_key, response_key_token, own_value, response_value_token,
            keys_response, seen_response, scaling, width, KEYS, WIDTH, WIDEN,
        )
        result = result / total[:, None]
        tl.store(
            out + where[:, None] + place[None, :],
            result.to(out.dtype.element_ty),
            mask=kept[:, None] & inside[None, :],
        )


@jit()
@no_type_check
def _highest(
    top, rows, base, distance, keys, seen, scaling, width,
    KEYS: tl.constexpr, WIDTH: tl.constexpr, WIDEN: tl.constexpr,
):
    """Returns the maximum of `top` and the scores of one sequence's keys, by row: exact in any order."""
    for start in range(0, keys, KEYS):
        scores = _scores(rows, base, distance, start, keys, seen, scaling, width, KEYS, WIDTH, WIDEN)
        top = tl.maximum(top, tl.max(scores, axis=1))
    return top


@jit()
@no_type_check
def _add(
    total, result, top, rows, key, key_distance, value, value_distance, keys, seen, scaling, width,
    KEYS: tl.constexpr, WIDTH: tl.constexpr, WIDEN: tl.constexpr,
):
    """Adds the exponentials and the weighted values of one sequence's keys to the sums, block by block."""
    for start in range(0, keys, KEYS):
        scores = _scores(rows, key, key_distance, start, keys, seen, scaling, width, KEYS, WIDTH, WIDEN)
        part = tl.exp(scores - top[:, None])
        total += tl.sum(part, axis=1)
        values = _block(value, value_distance, start, keys, width, KEYS, WIDTH)
        weights = part.to(values.dtype)
        if WIDEN:
            weights = weights.to(tl.float32)
            values = values.to(tl.float32)
        result = tl.dot(weights, values, result, input_precision="ieee")
    return total, result


@jit()
@no_type_check
def _scores(
    rows, base, distance, start, keys, seen, scaling, width,
    KEYS: tl.constexpr, WIDTH: tl.constexpr, WIDEN: tl.constexpr,
):
    """Returns (QUERIES, KEYS) scores of the keys from `start` on; -inf for keys that a row does not attend to."""
    block = _block(base, distance, start, keys, width, KEYS, WIDTH)
    if WIDEN:
        block = block.to(tl.float32)
    scores = tl.dot(rows, tl.trans(block), input_precision="ieee") * scaling
    key = start + tl.arange(0, KEYS)
    return tl.where(key[None, :] < seen[:, None], scores, float("-inf"))


# fmt: on


@jit()
@no_type_check
def _seen(prompt, response, further):
    """Returns the numbers of keys of the prompt and of the response that a query attends to.

    `prompt`, `response`: those of the first query of the sequence. `further`: queries between it and this one.
    """
    in_prompt = response == 0
    return prompt + tl.where(in_prompt, further, 0), tl.where(in_prompt, 0, response + further)


@jit()
@no_type_check
def _start(data, start, head):
    """Returns the address of a sequence's keys or values of one head. `_stored` guarantees that rows are aligned."""
    return data + tl.multiple_of(tl.load(start) + head, 8)


@jit()
@no_type_check
def _block(base, distance, start, keys, width, KEYS: tl.constexpr, WIDTH: tl.constexpr):
    """Returns (KEYS, WIDTH) keys or values from `start` on; zeros past the last one."""
    key = (start + tl.arange(0, KEYS)).to(tl.int64)
    place = tl.arange(0, WIDTH)
    where = tl.multiple_of(key * distance, [8])
    inside = (key < keys)[:, None] & (place < width)[None, :]
    return tl.load(base + where[:, None] + place[None, :], mask=inside, other=0.0)
