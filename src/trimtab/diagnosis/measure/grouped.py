"""The statistic behind every view: sums and a histogram of log-ratios for each group of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from trimtab.diagnosis.measure.bins import LOG_RATIO_BINS, quantiles
from trimtab.diagnosis.measure.trained_tokens import TrainedTokens
from trimtab.diagnosis.records import View

ENVELOPE = (0.02, 0.50, 0.98)


class Groups:
    """Sums (groups, 5) of 1, ratio - 1, log-ratio, k3 and |log-ratio|, and a histogram of the log-ratio.

    bins: of the histogram; 0 for none, where there are too many groups for one.
    """

    def __init__(self, groups: int, bins: int = LOG_RATIO_BINS) -> None:
        self.sums = np.zeros((groups, 5))
        self.histogram = np.zeros((groups, bins), dtype=np.int64)

    def add(self, group: np.ndarray, tokens: TrainedTokens) -> None:
        """Adds tokens to their groups (tokens,)."""
        groups, bins = self.histogram.shape
        self.sums += group_sums(group, tokens, groups)
        if bins:
            cells = np.bincount(group * bins + tokens.log_ratio_bin, minlength=groups * bins)
            self.histogram += cells.reshape(groups, bins)

    @property
    def count(self) -> np.ndarray:
        return self.sums[:, 0].astype(np.int64)

    @property
    def k3_sums(self) -> np.ndarray:
        return self.sums[:, 3]

    def merged(self, starts: np.ndarray) -> Groups:
        """Merges neighboring groups; `starts` are the first ones of the new groups."""
        result = Groups(0)
        result.sums = np.add.reduceat(self.sums, starts, axis=0)
        result.histogram = np.add.reduceat(self.histogram, starts, axis=0)
        return result

    def view(
        self,
        name: str,
        labels: Sequence[str],
        rows: np.ndarray | None = None,
        *,
        edges: np.ndarray | None = None,
        columns: Mapping[str, np.ndarray] | None = None,
        envelope: np.ndarray | None = None,
        note: str = "",
    ) -> View:
        """Returns the groups `rows`, or all, as a view; NaN in empty ones.

        envelope: the percentiles (groups, 3), where they are not those of the histogram.
        """
        rows = np.arange(len(self.sums)) if rows is None else rows
        envelope = quantiles(self.histogram[rows], ENVELOPE) if envelope is None else envelope
        with np.errstate(invalid="ignore"):
            excess, log, k3, size = (self.sums[rows, 1:] / self.sums[rows, :1]).T
        low, median, high = envelope.T
        return View(
            name=name,
            labels=tuple(labels),
            count=self.count[rows],
            ratio_mean=1.0 + excess,
            log_ratio_mean=log,
            k3=k3,
            abs_mean=size,
            low=low,
            median=median,
            high=high,
            edges=edges,
            columns=columns or {},
            note=note,
        )


def group_sums(group: np.ndarray, tokens: TrainedTokens, groups: int) -> np.ndarray:
    """Returns the sums of `Groups` over tokens (groups, 5)."""
    weights = (None, tokens.excess, tokens.log, tokens.k3, tokens.size)
    return np.column_stack([np.bincount(group, values, groups) for values in weights])


class KeyedSums:
    """Sums, maxima and a histogram of log-ratios by key (step, other), in bounded memory.

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
            # A copy: a view would keep the histograms of the whole table in memory.
            self._merge((step // self.width, other), (total[row], most[row], histogram[row].astype(np.uint32)))
        while len(self._rows) > self._most:
            rows, self._rows, self.width = self._rows, {}, 2 * self.width
            for (block, other), row in rows.items():
                self._merge((block // 2, other), row)

    def rows(self) -> Iterator[tuple[tuple[int, int], tuple[np.ndarray, np.ndarray, np.ndarray]]]:
        """Yields keys (block of steps, other) in order, each with its sums, maxima and histogram."""
        yield from sorted(self._rows.items(), key=lambda item: item[0])

    def _merge(self, key: tuple[int, int], row: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
        if key in self._rows:
            sums, largest, histogram = self._rows[key]
            row = (sums + row[0], np.maximum(largest, row[1]), histogram + row[2])
        self._rows[key] = row


def explained(values: np.ndarray, group: np.ndarray, least: int = 1) -> float:
    """Returns the share of the variance that groups of at least `least` values explain beyond chance.

    Beyond chance: more than groups without a meaning explain, by three standard deviations. 0 for a single group.
    """
    _, group, count = np.unique(group, return_inverse=True, return_counts=True)
    groups = int((count >= least).sum())
    if groups < 2:
        return 0.0
    used = (count >= least)[group]
    values, group = values[used], group[used]
    values = values - values.mean()
    means = np.bincount(group, values, len(count)) / count
    between = float((count * np.square(means))[count >= least].sum()) / max(float(values @ values), 1e-300)
    return between - (groups - 1 + 3 * float(np.sqrt(2 * (groups - 1)))) / len(values)
