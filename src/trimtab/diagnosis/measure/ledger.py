"""Grouped sums with unknown keys in bounded memory: neighboring steps merge when there are too many."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from trimtab.diagnosis.measure.bins import LOG_RATIO_BINS


class KeyedSums:
    """Sums, maxima and a histogram of log-ratios by key (step, other).

    With more than `most` rows, neighboring steps are merged into blocks of 2, 4, 8, ... steps, the smallest that fit.
    The blocks depend only on the keys, not on their order.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.width = 1
        self._rows: dict[tuple[int, int], tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def add(self, keys: np.ndarray, sums: np.ndarray, largest: np.ndarray, flat: tuple[np.ndarray, np.ndarray]) -> None:
        """Adds rows. keys (n, 2), which may repeat; sums (n, fields); largest (n, any).

        flat: of each token its row in keys and its log-ratio bin, both (tokens,).
        """
        unique, place = np.unique(keys, axis=0, return_inverse=True)
        place, count = place.reshape(-1), len(unique)
        cells = place[flat[0]] * LOG_RATIO_BINS + flat[1]
        histogram = np.bincount(cells, minlength=count * LOG_RATIO_BINS).reshape(count, LOG_RATIO_BINS)
        order = np.argsort(place, kind="stable")
        starts = np.searchsorted(place[order], np.arange(count))
        total, most = np.add.reduceat(sums[order], starts), np.maximum.reduceat(largest[order], starts)
        for row, (step, other) in enumerate(unique.tolist()):
            self._merge((step // self.width, other), (total[row], most[row], histogram[row]))
        while len(self._rows) > self._most:
            self._widen()

    def rows(self) -> Iterator[tuple[tuple[int, int], tuple[np.ndarray, np.ndarray, np.ndarray]]]:
        """Yields keys (block of steps, other) in order, each with its sums, maxima and histogram."""
        yield from sorted(self._rows.items(), key=lambda item: item[0])

    def _merge(self, key: tuple[int, int], row: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
        known = self._rows.get(key)
        if known is None:
            # A copy: a view would keep the histograms of the whole table in memory.
            self._rows[key] = (row[0], row[1], row[2].astype(np.uint32))
            return
        histogram = known[2] + row[2].astype(np.uint32)
        self._rows[key] = (known[0] + row[0], np.maximum(known[1], row[1]), histogram)

    def _widen(self) -> None:
        rows, self._rows, self.width = self._rows, {}, 2 * self.width
        for (block, other), row in rows.items():
            self._merge((block // 2, other), row)
