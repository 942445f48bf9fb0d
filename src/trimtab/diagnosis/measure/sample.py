"""A random sample of the responses, from which causes are inferred."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from trimtab.diagnosis.measure.trained_tokens import hash_index
from trimtab.diagnosis.records import finding
from trimtab.diagnosis.tokens import TokenTable, k3
from trimtab.errors import Finding, TrimtabError
from trimtab.text import short

SAMPLE_TOKENS = 400_000
LONGEST = SAMPLE_TOKENS // 8  # longer responses are truncated to this many tokens, so that none fills the sample


class Sample:
    """A random sample: the responses with the smallest hashes of their index, as many as fit into `tokens`.

    The sample does not depend on the split of the stream into tables: once a response does not fit, it and all
    responses with a larger hash are excluded for good.
    """

    def __init__(self, tokens: int = SAMPLE_TOKENS, longest: int = LONGEST) -> None:
        self._limit, self._longest = tokens, longest
        self._parts: list[TokenTable] = []
        self._numbers: list[np.ndarray] = []
        self._tokens = 0
        self._limit_hash = np.iinfo(np.uint64).max

    def add(self, table: TokenTable, first: int) -> None:
        """Adds a table; `first`: number of responses before it. Raises `TrimtabError` for different columns."""
        numbers = hash_index(np.arange(first, first + table.responses, dtype=np.uint64))
        keep = numbers < self._limit_hash
        if self._parts and (differing := table.columns.keys() ^ self._parts[0].columns.keys()):
            raise TrimtabError(
                f"the files have different columns ({', '.join(sorted(differing))} only in some): "
                "diagnose them one kind at a time"
            )
        if not keep.any() and self._parts:
            return
        piece = table.select(keep, self._longest)
        self._parts.append(piece)
        self._numbers.append(numbers[keep])
        self._tokens += piece.tokens
        if self._tokens > self._limit + self._limit // 4:
            self._trim()

    def result(self) -> TokenTable:
        """Returns the sample, in the order of the stream."""
        self._trim()
        return self._parts[0]

    def _trim(self) -> None:
        merged, numbers = TokenTable.concat(self._parts), np.concatenate(self._numbers)
        order = np.argsort(numbers)
        over = np.flatnonzero(np.cumsum(merged.lengths[order]) > self._limit)
        if len(over):
            self._limit_hash = numbers[order[over[0]]]
        keep = numbers < self._limit_hash
        self._parts, self._numbers = [merged.select(keep, self._longest)], [numbers[keep]]
        self._tokens = self._parts[0].tokens


def describe_sample(sample: TokenTable, trained: int) -> Iterator[Finding]:
    """Yields the size and k3 of the sample if causes are inferred from less than all data."""
    inside = sample.mask & np.isfinite(sample.behavior) & np.isfinite(sample.trainer)
    if inside.sum() < 0.99 * trained:
        part = float(k3(sample.trainer[inside].astype(np.float64) - sample.behavior[inside]).mean())
        first = f", of long ones the first {LONGEST:,} tokens" if (sample.lengths == LONGEST).any() else ""
        yield finding("sample", tokens=f"{inside.sum():,}", all=f"{trained:,}", first=first, k3=short(part))
