"""Batch-invariant attention in Triton: one kernel for packed rows and for decoding with a cache.

A query sees keys of its prompt and of its own response. Both are cut into blocks of `KEYS`, counted from the prompt's
and from the response's first key, as in `invariant_attention.py`. One program works on a tile of rows, a row being a
query of one head; heads that share a key head are rows of one program. It walks over the blocks twice: for the
maximum of each row's scores (exact in any order), and for the sum of exponentials and the weighted values, which are
added block by block in order, in float32.

Why a row's bits do not depend on the others, on how many queries a program holds, or on prefill or decoding:
- Scores, sums over a block and weighted values come from instructions on tiles of one shape; a decoding program's
  tile is filled up with copies of its last query. (A kernel for single queries is another order:
  vllm-project/flash-attention#169.) Within a tile all rows are treated alike; see `triton_product.product`.
- Keys that a row does not see have exponential 0 and add exactly 0, whether they are other queries' keys (prefill) or
  are not there yet (decoding). Values must be finite: 0 times infinity is no zero.
- Where a block begins depends on the text alone. Splitting the keys over programs, by their number or by the batch's
  size, would change the order of the sum; a fixed size of splits, as in the article `triton_product` names, or, as
  here, none at all, does not. The price is paid by long rows in small batches.
"""

from __future__ import annotations

from typing import NamedTuple, no_type_check

import torch
from jaxtyping import Float, Int
from torch import Tensor

from trimtab.errors import TrimtabError
from trimtab.models.invariant.kernels.runtime import (
    LAUNCH,
    aligned,
    interpreted,
    jit,
    parts,
    power_of_2,
    require,
    tl,
)
from trimtab.models.packed_attention import Layout, Rows

KEYS = 64


class Tile(NamedTuple):
    """Rows of one program, and how it is compiled."""

    queries: int
    warps: int
    stages: int


# By the type alone. float32 is computed outside of tensor cores: with more rows its numbers spill out of the registers.
TILES = {torch.bfloat16: Tile(64, warps=4, stages=2), torch.float32: Tile(16, warps=4, stages=1)}


class Keys(NamedTuple):
    """Where each sequence's keys and values lie: sequence `i` starts at `key[row[i], :, first[i]]`."""

    key: Float[Tensor, "rows key_heads time width"]
    value: Float[Tensor, "rows key_heads time width"]
    row: Int[Tensor, " sequences"]
    first: Int[Tensor, " sequences"]


class Queries(NamedTuple):
    """Consecutive queries of each sequence, and what the first of them sees; itself at least.

    Each further query sees one key more: of the response, or, where the first sees none of it, of the prompt.
    """

    first: Int[Tensor, " sequences"]  # among all queries
    counts: Int[Tensor, " sequences"]
    prompt: Int[Tensor, " sequences"]  # keys of the prompt that the first query sees
    response: Int[Tensor, " sequences"]
    longest: int  # the largest count, or more


def attend(
    query: Float[Tensor, "tokens heads width"], queries: Queries, prompt: Keys, response: Keys, scaling: float
) -> Float[Tensor, "tokens heads width"]:
    """softmax(scaling * query . keys) @ values for each query and head. No gradient. bfloat16 or float32, on CUDA.

    Exponentials are rounded to the type of the values before they weigh them; sums and the quotient are float32.
    Queries that belong to no sequence are zeros in the result. A prompt and a response may lie in one tensor or in
    two; decoding is a sequence of one query.
    """
    dtype = require(query, prompt.key, prompt.value, response.key, response.value)
    _, heads, width = query.shape
    key_heads = prompt.key.shape[1]
    tile = TILES[dtype]
    if heads % key_heads or heads // key_heads > tile.queries:
        raise TrimtabError(
            f"{heads} heads over {key_heads} key heads; at most {tile.queries} may share one, equally many each"
        )
    if width % 8:
        raise TrimtabError(f"invariant attention on CUDA wants heads of a multiple of 8 numbers, got {width}")
    query = aligned(query)
    out = torch.zeros_like(query)
    group, sequences = heads // key_heads, len(queries.counts)
    tiles = parts(queries.longest, tile.queries // group)
    if sequences and tiles:
        prompt_key, prompt_value = _stored(prompt.key, prompt), _stored(prompt.value, prompt)
        response_key, response_value = _stored(response.key, response), _stored(response.value, response)
        _attend[(sequences * tiles, key_heads)](
            *(query, out, prompt_key.data, prompt_value.data, response_key.data, response_value.data),
            *(numbers.long().contiguous() for numbers in queries[:4]),
            *(prompt_key.start, prompt_value.start, response_key.start, response_value.start),
            *(prompt_key.head, prompt_key.token, prompt_value.head, prompt_value.token),
            *(response_key.head, response_key.token, response_value.head, response_value.token),
            *(tiles, scaling, width, group, key_heads),
            *(tile.queries, KEYS, max(16, power_of_2(width)), interpreted()),
            num_warps=tile.warps,
            num_stages=tile.stages,
            **LAUNCH,
        )
    return out


def packed(
    query: Float[Tensor, "tokens channels"],
    key: Float[Tensor, "tokens key_channels"],
    value: Float[Tensor, "tokens key_channels"],
    layout: Layout,
    width: int,
    scaling: float,
) -> Float[Tensor, "tokens channels"]:
    """`attend` over a packed micro-batch: prompts look at themselves, responses at their prompt and at themselves."""
    prompts, index = layout.prompt_lengths.long(), layout.prompt_index
    responses = _lengths(layout.responses, query.device)
    one, zero = torch.ones_like(prompts), torch.zeros_like(responses)
    begins = layout.prompts.start + prompts.cumsum(0) - prompts
    own = torch.cat([begins, layout.responses.start + responses.cumsum(0) - responses])
    spans = Queries(
        first=own,
        counts=torch.cat([prompts, responses]),
        prompt=torch.cat([one, prompts[index]]),
        response=torch.cat([one - 1, zero + 1]),
        longest=max(layout.prompts.width, layout.responses.width),
    )
    k, v = (x.view(1, len(query), -1, width).transpose(1, 2) for x in (key.contiguous(), value.contiguous()))
    row = torch.zeros_like(own)
    shared = Keys(k, v, row, torch.cat([begins, begins[index]]))
    return attend(query.view(len(query), -1, width), spans, shared, Keys(k, v, row, own), scaling).flatten(1)


def _lengths(rows: Rows, device: torch.device) -> Int[Tensor, " rows"]:
    """How many tokens each row holds, without waiting for the device."""
    if rows.slots is None:
        return torch.full((rows.batch,), rows.width, device=device)
    counts = torch.zeros(rows.batch, dtype=torch.int64, device=device)
    return counts.index_add_(0, rows.slots // rows.width, torch.ones_like(rows.slots))


class _Stored(NamedTuple):
    """Numbers and where to find them: distances in numbers, of heads and tokens, and each sequence's start."""

    data: Tensor
    start: Int[Tensor, " sequences"]
    head: int
    token: int


def _stored(data: Tensor, keys: Keys) -> _Stored:
    """As it lies, if every row of a head starts at an aligned address, so that one variant of the kernel reads all."""
    if data.stride(3) != 1 or data.data_ptr() % 16 or any(distance % 8 for distance in data.stride()[:3]):
        data = aligned(data)
    row, head, token, _ = data.stride()
    return _Stored(data, keys.row.long() * row + keys.first * token, head, token)


# Arguments in groups, one line for each.
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
    query, out, prompt_key, prompt_value, response_key, response_value,
    first_query, query_count, prompt_seen, response_seen,
    prompt_key_start, prompt_value_start, response_key_start, response_value_start,
    prompt_key_head, prompt_key_token, prompt_value_head, prompt_value_token,
    response_key_head, response_key_token, response_value_head, response_value_token,
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
        in_prompt = own == 0
        seen_prompt = base + tl.where(in_prompt, token, 0)
        seen_response = tl.where(in_prompt, 0, own + token)
        last = tl.minimum(begin + tokens, count) - 1
        keys_prompt = base + tl.where(in_prompt, last, 0)
        keys_response = tl.where(in_prompt, 0, own + last)
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
    """The highest score of each row so far, over one sequence's keys: exact in any order."""
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
    """Sums of exponentials and weighted values so far, with those of one sequence's keys, block by block."""
    for start in range(0, keys, KEYS):
        scores = _scores(rows, key, key_distance, start, keys, seen, scaling, width, KEYS, WIDTH, WIDEN)
        part = tl.exp(scores - top[:, None])
        total += tl.sum(part, axis=1)
        values = _block(value, value_distance, start, keys, width, KEYS, WIDTH)
        result = _weigh(part, values, result, WIDEN)
    return total, result


# fmt: on


@jit()
@no_type_check
def _start(data, start, head):
    """Where a sequence's keys or values of one head begin. `_stored` sees to it that all rows are aligned."""
    return data + tl.multiple_of(tl.load(start) + head, 8)


@jit()
@no_type_check
def _block(base, distance, start, keys, width, KEYS: tl.constexpr, WIDTH: tl.constexpr):
    """(KEYS, WIDTH) keys or values from `start` on; zeros past the last one."""
    key = (start + tl.arange(0, KEYS)).to(tl.int64)
    place = tl.arange(0, WIDTH)
    where = tl.multiple_of(key * distance, [8])
    inside = (key < keys)[:, None] & (place < width)[None, :]
    return tl.load(base + where[:, None] + place[None, :], mask=inside, other=0.0)


@jit()
@no_type_check
def _scores(
    rows,
    base,
    distance,
    start,
    keys,
    seen,
    scaling,
    width,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """(QUERIES, KEYS) scores of the keys from `start` on; -inf for keys that a row does not see."""
    block = _block(base, distance, start, keys, width, KEYS, WIDTH)
    if WIDEN:
        block = block.to(tl.float32)
    scores = tl.dot(rows, tl.trans(block), input_precision="ieee") * scaling
    key = start + tl.arange(0, KEYS)
    return tl.where(key[None, :] < seen[:, None], scores, float("-inf"))


@jit()
@no_type_check
def _weigh(part, values, result, WIDEN: tl.constexpr):
    """`result` plus exponentials times values, both in the values' type."""
    weights = part.to(values.dtype)
    if WIDEN:
        weights = weights.to(tl.float32)
        values = values.to(tl.float32)
    return tl.dot(weights, values, result, input_precision="ieee")
