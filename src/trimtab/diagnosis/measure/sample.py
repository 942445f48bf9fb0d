"""An even sample of whole responses from a stream of unknown length."""

from __future__ import annotations

import numpy as np

from trimtab.diagnosis.measure.trained_tokens import hash_index
from trimtab.diagnosis.tokens import TokenTable
from trimtab.errors import TrimtabError

TOKENS = 400_000
LONGEST = TOKENS // 8
"""Longer responses are truncated to this many tokens, so that none fills the sample."""


class Sample:
    """The responses with the smallest hash of their index, as many as fit into `tokens`.

    The sample does not depend on the split of the stream into tables: once a response does not fit, it and all with a
    larger hash are excluded for good.
    """

    def __init__(self, tokens: int = TOKENS, longest: int = LONGEST) -> None:
        self._limit, self._longest = tokens, longest
        self._kept: list[TokenTable] = []
        self._numbers: list[np.ndarray] = []
        self._tokens = 0
        self._limit_hash = np.iinfo(np.uint64).max

    def add(self, table: TokenTable, first: int) -> None:
        """Adds a table; `first`: number of responses before it. Raises `TrimtabError` for different columns."""
        numbers = hash_index(np.arange(first, first + table.responses, dtype=np.uint64))
        keep = numbers < self._limit_hash
        if self._kept and (differing := table.columns.keys() ^ self._kept[0].columns.keys()):
            raise TrimtabError(
                f"the files have different columns ({', '.join(sorted(differing))} only in some): "
                "diagnose them one kind at a time"
            )
        if not keep.any() and self._kept:
            return
        piece = table.select(keep, self._longest)
        self._kept.append(piece)
        self._numbers.append(numbers[keep])
        self._tokens += piece.tokens
        if self._tokens > self._limit + self._limit // 4:
            self._trim()

    def result(self) -> TokenTable:
        """Returns the sample, in the order of the stream."""
        self._trim()
        return self._kept[0]

    def _trim(self) -> None:
        merged, numbers = TokenTable.concat(self._kept), np.concatenate(self._numbers)
        order = np.argsort(numbers)
        over = np.flatnonzero(np.cumsum(merged.lengths[order]) > self._limit)
        if len(over):
            self._limit_hash = numbers[order[over[0]]]
        keep = numbers < self._limit_hash
        self._kept, self._numbers = [merged.select(keep, self._longest)], [numbers[keep]]
        self._tokens = self._kept[0].tokens
