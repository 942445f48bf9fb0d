"""An even sample of whole responses from a stream of unknown length."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np

from trimtab.diagnosis.measure.trained_tokens import hash_index
from trimtab.diagnosis.records import Chunk
from trimtab.errors import TrimtabError

TOKENS = 400_000
LONGEST = TOKENS // 8
"""Longer responses are truncated to this many tokens, so that none fills the sample."""
_PER_RESPONSE = frozenset(
    ("step", "group", "proximal_version", "reward", "advantage", "temperature", "top_p", "top_k", "raw")
)


class Sample:
    """The responses with the smallest hash of their index, as many as fit into `tokens`.

    The sample does not depend on the split of the stream into chunks: once a response does not fit, it and all with a
    larger hash are excluded for good.
    """

    def __init__(self, tokens: int = TOKENS, longest: int = LONGEST) -> None:
        self._limit, self._longest = tokens, longest
        self._kept: list[Chunk] = []
        self._numbers: list[np.ndarray] = []
        self._tokens = 0
        self._limit_hash = np.iinfo(np.uint64).max

    def add(self, chunk: Chunk, first: int) -> None:
        """Adds a chunk; `first`: number of responses before it. Raises `TrimtabError` for different columns."""
        numbers = hash_index(np.arange(first, first + chunk.responses, dtype=np.uint64))
        keep = numbers < self._limit_hash
        if self._kept and columns(chunk) != columns(self._kept[0]):
            raise TrimtabError(
                f"the files have different columns ({_difference(chunk, self._kept[0])}): "
                "diagnose them one kind at a time"
            )
        if not keep.any() and self._kept:
            return
        piece = taken(chunk, keep, self._longest)
        self._kept.append(piece)
        self._numbers.append(numbers[keep])
        self._tokens += piece.tokens
        if self._tokens > self._limit + self._limit // 4:
            self._trim()

    def result(self) -> Chunk:
        """Returns the sample, in the order of the stream."""
        self._trim()
        return self._kept[0]

    def _trim(self) -> None:
        merged, numbers = joined(self._kept), np.concatenate(self._numbers)
        order = np.argsort(numbers)
        over = np.flatnonzero(np.cumsum(np.diff(merged.starts)[order]) > self._limit)
        if len(over):
            self._limit_hash = numbers[order[over[0]]]
        keep = numbers < self._limit_hash
        self._kept, self._numbers = [taken(merged, keep, self._longest)], [numbers[keep]]
        self._tokens = self._kept[0].tokens


def columns(chunk: Chunk) -> frozenset[str]:
    """Returns the names of the arrays that a chunk has."""
    return frozenset(item.name for item in fields(chunk) if getattr(chunk, item.name) is not None)


def taken(chunk: Chunk, keep: np.ndarray, longest: int) -> Chunk:
    """Returns the responses where `keep` (responses,) is True, each truncated to at most `longest` tokens."""
    lengths = np.where(keep, np.minimum(np.diff(chunk.starts), longest), 0)
    shift = chunk.starts[:-1] - (np.cumsum(lengths) - lengths)
    places = np.arange(lengths.sum()) + np.repeat(shift, lengths)
    chosen = {
        name: getattr(chunk, name)[keep if name in _PER_RESPONSE else places] for name in columns(chunk) - {"starts"}
    }
    return replace(chunk, starts=np.append(0, np.cumsum(lengths[keep])), **chosen)


def joined(chunks: list[Chunk]) -> Chunk:
    """Concatenates chunks with the same columns."""
    ends = np.cumsum([chunk.tokens for chunk in chunks])
    starts = [chunk.starts[1:] + end - chunk.tokens for chunk, end in zip(chunks, ends, strict=True)]
    arrays = {
        name: np.concatenate([getattr(chunk, name) for chunk in chunks]) for name in columns(chunks[0]) - {"starts"}
    }
    return replace(chunks[0], starts=np.concatenate([np.zeros(1, dtype=np.int64), *starts]), **arrays)


def _difference(one: Chunk, other: Chunk) -> str:
    return ", ".join(sorted(columns(one) ^ columns(other))) + " only in some"
