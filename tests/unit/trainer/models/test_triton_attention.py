"""Attention in Triton's interpreter: packed rows, decoding from a cache, any composition of the batch, and float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.triton_support import DTYPES, INTERPRETED, REASON, close, tile_products  # noqa: F401
from torch import Tensor

from trimtab.errors import TrimtabError
from trimtab.trainer.models.invariant.kernels.attention_kernel import QuerySpans, StoredKeys, attend, attend_packed
from trimtab.trainer.models.packed_attention import PackedLayout

if not INTERPRETED:
    pytest.skip(REASON, allow_module_level=True)

HEADS, KEY_HEADS, WIDTH = 6, 2, 32  # three heads share a key head: 21 queries fill a program (5 in float32)
SCALING = WIDTH**-0.5
# Around the edges of blocks of 64 keys, of programs of 21 queries, and of nothing.
PROMPTS, RESPONSES, INDEX = (1, 64, 70), (3, 65, 1, 22), (2, 0, 1, 2)


def states(count: int, heads: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, heads * WIDTH, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Texts:
    """Queries, keys and values of prompts and responses, and each text's own, however they are packed."""

    def __init__(self, dtype: torch.dtype, prompts: Any = PROMPTS, responses: Any = RESPONSES, index: Any = INDEX):
        self.index = index
        lengths = [*prompts, *responses]
        # A text's numbers depend on the text, not on its place: a prompt's are named by its length.
        seeds = [*prompts, *(100 + count for count in responses)]
        self.parts = [
            [states(count, heads, 3 * seed + kind, dtype) for count, seed in zip(lengths, seeds, strict=True)]
            for kind, heads in enumerate((HEADS, KEY_HEADS, KEY_HEADS))
        ]
        self.prompts, self.responses = prompts, responses
        self.layout = PackedLayout.build(_mask(prompts), _mask(responses), torch.tensor(index))

    def run(self) -> list[Tensor]:
        """The result of each text's tokens."""
        q, k, v = (torch.cat(part) for part in self.parts)
        return list(attend_packed(q, k, v, self.layout, WIDTH, SCALING).split([*self.prompts, *self.responses]))

    def whole(self, kind: int, response: int, heads: int) -> Tensor:
        """A response's states behind its prompt's, (heads, time, width)."""
        parts = self.parts[kind]
        both = torch.cat([parts[self.index[response]], parts[len(self.prompts) + response]])
        return both.view(-1, heads, WIDTH).transpose(0, 1)


def _mask(lengths: Any) -> Tensor:
    return torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_rows_are_close_to_float64(dtype: torch.dtype) -> None:
    texts = Texts(dtype)
    output = texts.run()
    for response in range(len(RESPONSES)):
        q, k, v = (texts.whole(kind, response, (HEADS, KEY_HEADS, KEY_HEADS)[kind]).double() for kind in range(3))
        k, v = (x.repeat_interleave(HEADS // KEY_HEADS, 0) for x in (k, v))
        visible = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).tril()
        scores = (q @ k.transpose(1, 2) * SCALING).masked_fill(~visible, -torch.inf)
        exact = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        prompt = INDEX[response]
        both = torch.cat([output[prompt], output[len(PROMPTS) + response]])
        close(both, exact, dtype, units=4)


def cache(texts: Texts, kind: int, response: int, length: int, heads_first: bool, room: int = 80) -> tuple[Tensor, ...]:
    """Keys or values of one prompt and of a response's first tokens, in buffers with whatever was there before."""
    parts = texts.parts[kind]
    buffers = []
    for part in (parts[texts.index[response]], parts[len(texts.prompts) + response][:length]):
        shape = (2, KEY_HEADS, room, WIDTH) if heads_first else (2, room, KEY_HEADS, WIDTH)
        buffer = torch.full(shape, 1e4, dtype=part.dtype)
        view = buffer if heads_first else buffer.transpose(1, 2)
        view[1, :, : len(part)] = part.view(-1, KEY_HEADS, WIDTH).transpose(0, 1)
        buffers.append(view)
    return tuple(buffers)


def decode(texts: Texts, response: int, at: int, heads_first: bool = True) -> Tensor:
    """The result of one token of a response, from a cache that holds what came before and it."""
    k, v = (cache(texts, kind, response, at + 1, heads_first) for kind in (1, 2))
    row, zero = torch.tensor([1]), torch.tensor([0])
    query = texts.parts[0][len(texts.prompts) + response][at : at + 1].view(1, HEADS, WIDTH)
    visible = torch.tensor([texts.prompts[texts.index[response]]])
    queries = QuerySpans(zero, row, visible, torch.tensor([at + 1]), 1)
    return attend(
        query, queries, StoredKeys(k[0], v[0], row, zero), StoredKeys(k[1], v[1], row, zero), SCALING
    ).flatten()


@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_and_decoding_have_equal_bits(dtype: torch.dtype) -> None:
    texts = Texts(dtype)
    output = texts.run()
    for response, at in ((0, 0), (0, 2), (1, 0), (1, 20), (1, 21), (1, 62), (1, 63), (1, 64), (2, 0), (3, 21)):
        whole = output[len(PROMPTS) + response][at]
        assert torch.equal(decode(texts, response, at), whole), (response, at)
    assert torch.equal(decode(texts, 1, 64, heads_first=False), output[len(PROMPTS) + 1][64])


@pytest.mark.parametrize("dtype", DTYPES)
def test_other_texts_and_padding_change_nothing(dtype: torch.dtype) -> None:
    output = Texts(dtype).run()
    others = Texts(dtype, prompts=(70, 2, 64, 66), responses=(22, 24, 3), index=(0, 3, 0)).run()
    assert torch.equal(others[0], output[2])
    assert torch.equal(others[2], output[1])
    assert torch.equal(others[4], output[len(PROMPTS) + 3])
    assert torch.equal(others[6], output[len(PROMPTS) + 0])


def test_a_batch_decodes_as_each_row_alone() -> None:
    texts = Texts(torch.float32)
    ends = [3, 65, 1, 22]
    stores = [[cache(texts, kind, i, ends[i], True) for i in range(4)] for kind in (1, 2)]
    zero, row = torch.zeros(4, dtype=torch.int64), torch.arange(4)
    keys = [
        StoredKeys(*(torch.stack([store[i][part][1] for i in range(4)]) for store in stores), row, zero)
        for part in (0, 1)
    ]
    last = torch.cat([texts.parts[0][len(PROMPTS) + i][ends[i] - 1 : ends[i]] for i in range(4)])
    visible = torch.tensor([PROMPTS[i] for i in INDEX])
    queries = QuerySpans(row, torch.ones_like(row), visible, torch.tensor(ends), 1)
    result = attend(last.view(4, HEADS, WIDTH), queries, *keys, SCALING).flatten(1)
    for i in range(4):
        assert torch.equal(result[i], decode(texts, i, ends[i] - 1))


def test_a_prefill_in_parts_is_the_whole_prefill() -> None:
    texts = Texts(torch.float32)
    q, k, v = (texts.parts[kind][2] for kind in range(3))
    row = torch.tensor([0])
    store = StoredKeys(*(x.view(1, -1, KEY_HEADS, WIDTH).transpose(1, 2) for x in (k, v)), row, row)

    def run(first: int, stop: int) -> Tensor:
        queries = QuerySpans(row, torch.tensor([stop - first]), torch.tensor([first + 1]), row, stop - first)
        return attend(q[first:stop].view(-1, HEADS, WIDTH), queries, store, store, SCALING)

    assert torch.equal(torch.cat([run(0, 30), run(30, 31), run(31, 70)]), run(0, 70))


@pytest.mark.parametrize(("response", "at"), [(1, 64), (3, 21)])
def test_blocks_that_do_not_begin_anew_with_the_response_are_found(response: int, at: int) -> None:
    """The usual cache: prompt and response in one row of keys, cut into blocks from its beginning."""
    texts = Texts(torch.float32)
    k, v = (
        texts.whole(kind, response, KEY_HEADS)[:, : texts.prompts[texts.index[response]] + at + 1] for kind in (1, 2)
    )
    zero = torch.tensor([0])
    store = StoredKeys(k[None], v[None], zero, zero)
    query = texts.parts[0][len(PROMPTS) + response][at : at + 1].view(1, HEADS, WIDTH)
    queries = QuerySpans(zero, zero + 1, torch.tensor([k.shape[1]]), zero, 1)
    fault = attend(query, queries, store, store, SCALING).flatten()
    whole = texts.run()[len(PROMPTS) + response][at]
    torch.testing.assert_close(fault, whole)
    assert not torch.equal(fault, whole)


@pytest.mark.parametrize(("heads", "key_heads", "width"), [(2, 2, 40), (4, 1, 8), (3, 3, 64)])
def test_other_heads(heads: int, key_heads: int, width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(5, heads, width, generator=generator)
    k, v = (torch.randn(1, key_heads, 5, width, generator=generator) for _ in range(2))
    zero = torch.tensor([0])
    store = StoredKeys(k, v, zero, zero)
    output = attend(q, QuerySpans(zero, zero + 5, zero + 1, zero, 5), store, store, 0.3)
    k, v = (x[0].double().repeat_interleave(heads // key_heads, 0) for x in (k, v))
    scores = q.double().transpose(0, 1) @ k.transpose(1, 2) * 0.3
    visible = torch.ones(5, 5, dtype=torch.bool).tril()
    exact = (scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v).transpose(0, 1)
    close(output.flatten(1), exact.flatten(1), torch.float32)


def test_large_scores_do_not_overflow() -> None:
    """The first key wins altogether."""
    zero = torch.tensor([0])
    k = torch.tensor([[1e4, 0.0], [-1e4, 0.0]]).repeat(1, 4)[None, None]
    v = torch.arange(16.0).view(1, 1, 2, 8)
    store = StoredKeys(k, v, zero, zero)
    output = attend(torch.ones(1, 1, 8), QuerySpans(zero, zero + 1, zero + 2, zero, 1), store, store, 1.0)
    assert output.flatten().tolist() == v[0, 0, 0].tolist()


def test_mistakes_have_one_clear_line() -> None:
    zero = torch.tensor([0])
    store = StoredKeys(torch.zeros(1, 2, 4, 12), torch.zeros(1, 2, 4, 12), zero, zero)
    queries = QuerySpans(zero, zero + 1, zero + 1, zero, 1)
    with pytest.raises(TrimtabError, match="3 heads over 2 key heads"):
        attend(torch.zeros(1, 3, 12), queries, store, store, 1.0)
    with pytest.raises(TrimtabError, match="a multiple of 8 numbers, got 12"):
        attend(torch.zeros(1, 2, 12), queries, store, store, 1.0)
