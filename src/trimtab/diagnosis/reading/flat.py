"""Lists of equal length stored end to end."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Flat:
    """Rows end to end: every array has `lengths.sum()` entries."""

    lengths: np.ndarray
    values: dict[str, np.ndarray]

    @property
    def first(self) -> np.ndarray:
        return np.cumsum(self.lengths) - self.lengths

    @property
    def row(self) -> np.ndarray:
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    def select(self, rows: np.ndarray) -> Flat:
        if rows.all():
            return self
        tokens = np.repeat(rows, self.lengths)
        return Flat(self.lengths[rows], {name: values[tokens] for name, values in self.values.items()})

    def cut(self, first: np.ndarray, last: np.ndarray) -> Flat:
        """Only the entries first <= i < last of each row."""
        if not first.any() and np.array_equal(last, self.lengths):
            return self
        place = np.arange(int(self.lengths.sum())) - np.repeat(self.first, self.lengths)
        tokens = (place >= np.repeat(first, self.lengths)) & (place < np.repeat(last, self.lengths))
        return Flat(last - first, {name: values[tokens] for name, values in self.values.items()})

    def without(self, tokens: np.ndarray) -> Flat:
        """All but the marked tokens; the rows stay, if only as empty ones."""
        if not tokens.any():
            return self
        lengths = self.lengths - np.bincount(self.row[tokens], minlength=len(self.lengths))
        return Flat(lengths, {name: values[~tokens] for name, values in self.values.items()})

    def having(self, tokens: np.ndarray) -> np.ndarray:
        """Rows (rows,) with at least one of the marked tokens."""
        return np.bincount(self.row[tokens], minlength=len(self.lengths)) > 0
