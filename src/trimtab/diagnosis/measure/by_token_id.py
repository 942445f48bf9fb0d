"""The view by token id: the ids that carry most of the mismatch."""

from __future__ import annotations

import numpy as np

from trimtab.diagnosis.measure.bins import FEWEST
from trimtab.diagnosis.measure.trained_tokens import TrainedTokens
from trimtab.diagnosis.measure.views import ENVELOPE, view
from trimtab.diagnosis.records import View
from trimtab.diagnosis.tokens import TokenTable

MAX_TOKENS_SHOWN = 20
_LARGEST = 1 << 20
"""Larger and negative ids share this one: no vocabulary is that large."""


class TokenIdView:
    """Sums for every id of the vocabulary; the percentiles of the ids shown are computed from the sample."""

    def __init__(self) -> None:
        self._count = np.zeros(0, dtype=np.int64)
        self._sums = np.zeros((0, 4))

    def add(self, tokens: TrainedTokens) -> None:
        if tokens.table.ids is None or not len(tokens):
            return
        ids = known(tokens.at_tokens(tokens.table.ids))
        size = max(int(ids.max()) + 1, len(self._count))
        self._count = np.bincount(ids, minlength=size) + np.pad(self._count, (0, size - len(self._count)))
        self._sums = np.pad(self._sums, ((0, size - len(self._sums)), (0, 0)))
        for column, values in enumerate((tokens.excess, tokens.log, tokens.k3, tokens.size)):
            self._sums[:, column] += np.bincount(ids, weights=values, minlength=size)

    def view(self, sample: TokenTable) -> View | None:
        """Returns the ids with the largest sums of k3, largest first, ties by id."""
        ids = np.flatnonzero(self._count)
        if not len(ids):
            return None
        k3 = self._sums[ids, 2]
        top = ids[np.lexsort((ids, -k3))[:MAX_TOKENS_SHOWN]]
        labels = ["other" if number == _LARGEST else str(number) for number in top]
        columns = {
            "id": np.where(top == _LARGEST, -1, top),
            "share": self._sums[top, 2] / k3.sum() if k3.sum() > 0 else np.zeros(len(top)),
        }
        low, median, high = _envelopes(sample, top).T
        note = f"percentiles are of the sample, where it has {FEWEST} such tokens"
        return view("token", labels, self._count[top], self._sums[top], (low, median, high), None, columns, note)


def known(ids: np.ndarray) -> np.ndarray:
    """Replaces negative and too large ids by `_LARGEST`."""
    return np.where((ids < 0) | (ids > _LARGEST), _LARGEST, ids)


def _envelopes(sample: TokenTable, top: np.ndarray) -> np.ndarray:
    assert sample.ids is not None
    ids, log = known(sample.ids[sample.mask]), (sample.trainer.astype(np.float64) - sample.behavior)[sample.mask]
    order = np.argsort(ids, kind="stable")
    low, high = np.searchsorted(ids[order], top), np.searchsorted(ids[order], top, side="right")
    log_ratios = [log[order[start:end]] for start, end in zip(low, high, strict=True)]
    envelopes = [
        np.quantile(values, ENVELOPE) if len(values) >= FEWEST else np.full(3, np.nan) for values in log_ratios
    ]
    return np.array(envelopes)
