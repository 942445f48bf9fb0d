"""Grouped sums with unknown keys in bounded memory: neighboring steps merge when there are too many."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from trimtab.diagnosis.measure.bins import LOG_RATIO_BINS


class KeyedSums:
    """Rows under (step, other): sums, largest values and a histogram of log-ratios that merge when keys do.

    With more than `most` rows, neighboring steps become one: blocks of 2, 4, 8 ... steps, the fewest that fit. Which
    steps share a block depends only on the keys, not on the order in which they came.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.width = 1
        self._rows: dict[tuple[int, int], tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def add(self, keys: np.ndarray, sums: np.ndarray, largest: np.ndarray, flat: tuple[np.ndarray, np.ndarray]) -> None:
        """keys (n, 2), sums (n, fields), largest (n, any), and tokens as (row in keys, log-ratio bin), each (tokens,).

        Keys may repeat.
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
        """Keys (block of steps, other) in order, each with its sums, largest values and histogram."""
        yield from sorted(self._rows.items(), key=lambda item: item[0])

    def _merge(self, key: tuple[int, int], row: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
        known = self._rows.get(key)
        if known is None:
            # A histogram of its own, not a view that keeps the whole chunk's alive.
            self._rows[key] = (row[0], row[1], row[2].astype(np.uint32))
            return
        histogram = known[2] + row[2].astype(np.uint32)
        self._rows[key] = (known[0] + row[0], np.maximum(known[1], row[1]), histogram)

    def _widen(self) -> None:
        rows, self._rows, self.width = self._rows, {}, 2 * self.width
        for (block, other), row in rows.items():
            self._merge((block // 2, other), row)
