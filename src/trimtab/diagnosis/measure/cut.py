"""Sums per bin of one view, and the view made from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from trimtab.diagnosis.measure.bins import LOG_RATIO_BINS, quantiles
from trimtab.diagnosis.measure.trained_tokens import Trained
from trimtab.diagnosis.records import View

ENVELOPE = (0.02, 0.50, 0.98)


class Cut:
    """Trained tokens cut into bins: per bin a histogram of the log-ratio and the sums that means are made of."""

    def __init__(self, bins: int) -> None:
        self.histogram = np.zeros((bins, LOG_RATIO_BINS), dtype=np.int64)
        self.sums = np.zeros((bins, 4))  # of ratio - 1, log-ratio, k3, |log-ratio|

    def add(self, index: np.ndarray, tokens: Trained, where: np.ndarray | None = None) -> None:
        """Count tokens in the bins `index`; with `where` (indices of tokens) only those, `index` being theirs."""
        bins, width = self.histogram.shape
        chosen = slice(None) if where is None else where
        flat = index * width + tokens.log_ratio_bin[chosen]
        self.histogram += np.bincount(flat, minlength=bins * width).reshape(bins, width)
        for column, values in enumerate((tokens.excess, tokens.log, tokens.k3, tokens.size)):
            self.sums[:, column] += np.bincount(index, weights=values[chosen], minlength=bins)

    @property
    def count(self) -> np.ndarray:
        return self.histogram.sum(axis=1)

    def merged(self, starts: np.ndarray) -> Cut:
        """Neighboring bins as one; each of `starts` is the first of its new bin."""
        merged = Cut(0)
        merged.histogram = np.add.reduceat(self.histogram, starts, axis=0)
        merged.sums = np.add.reduceat(self.sums, starts, axis=0)
        return merged

    def chosen(self, rows: np.ndarray) -> Cut:
        """Only these bins, in this order."""
        chosen = Cut(0)
        chosen.histogram, chosen.sums = self.histogram[rows], self.sums[rows]
        return chosen

    def view(
        self,
        name: str,
        labels: Sequence[str],
        edges: np.ndarray | None = None,
        columns: Mapping[str, np.ndarray] | None = None,
        note: str = "",
    ) -> View:
        """The bins as a view; what has no token is NaN."""
        low, median, high = quantiles(self.histogram, ENVELOPE).T
        return view(name, labels, self.count, self.sums, (low, median, high), edges, columns, note)


def view(
    name: str,
    labels: Sequence[str],
    count: np.ndarray,
    sums: np.ndarray,
    envelope: tuple[np.ndarray, np.ndarray, np.ndarray],
    edges: np.ndarray | None = None,
    columns: Mapping[str, np.ndarray] | None = None,
    note: str = "",
) -> View:
    """A view from counts (bins,), sums (bins, 4) as in `Cut` and the envelope's three percentiles."""
    with np.errstate(invalid="ignore"):
        excess, log, k3, size = (sums / count[:, None]).T
    low, median, high = envelope
    return View(
        name, tuple(labels), count, 1.0 + excess, log, k3, size, low, median, high, edges, dict(columns or {}), note
    )
