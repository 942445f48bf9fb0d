"""What the seeds of one recipe agree on: the mean, and how far it can be trusted.

From five seeds on, the interval is that of the mean, by a percentile bootstrap over seeds (2.5 to 97.5%). Fewer seeds
say too little for that; there it runs from the lowest seed to the highest, which is a range and no confidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

Series = tuple[np.ndarray, np.ndarray]
BOOTSTRAP_FROM = 5  # seeds
SEPARABLE_FROM = 3  # seeds; the ranges of two and two lie apart by chance in one of three cases
_RESAMPLES = 2000
_QUANTILES = (0.025, 0.975)
_SMOOTH_FROM, _POINTS = 80, 240


@dataclass(frozen=True)
class Interval:
    """Mean of `count` seeds and the interval around it; a single seed has none (`low` and `high` are its value)."""

    mean: float
    low: float
    high: float
    count: int


@dataclass(frozen=True, eq=False)
class Band:
    """Mean and interval over `steps`; each array (steps,) float64."""

    steps: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def rule(seeds: int) -> str:
    """What the interval of so many seeds is, in words."""
    if seeds < 2:
        return "a single seed, no interval"
    return "2.5 to 97.5% of the mean (bootstrap)" if seeds >= BOOTSTRAP_FROM else "lowest to highest seed"


def interval(values: Sequence[float]) -> Interval | None:
    """Of one number for each seed; None without any."""
    if not len(values):
        return None
    low, high = _bounds(np.asarray(values, dtype=np.float64)[:, None])
    return Interval(float(np.mean(values)), float(low[0]), float(high[0]), len(values))


def best(intervals: Sequence[Interval | None], *, highest: bool) -> int | None:
    """The one that lies apart from all others on the better side; None when none does.

    Every one must come from at least three seeds: how far apart fewer lie says nothing.
    """
    known = [(index, item) for index, item in enumerate(intervals) if item is not None]
    if len(known) < 2 or any(item.count < SEPARABLE_FROM for _, item in known):
        return None
    sign = 1 if highest else -1
    ranked = sorted(known, key=lambda pair: -sign * pair[1].mean)
    (index, first), rest = ranked[0], ranked[1:]
    apart = all(first.low > item.high if highest else first.high < item.low for _, item in rest)
    return index if apart else None


def band(series: Sequence[Series]) -> Band | None:
    """Over the steps all seeds have: a mean of those that lasted would show the survivors. None when there are none."""
    if not series:
        return None
    steps = reduce(np.intersect1d, [steps for steps, _ in series])
    if not len(steps):
        return None
    table = np.stack([values[np.isin(own, steps)] for own, values in series])
    low, high = _bounds(table)
    return Band(steps, table.mean(axis=0), low, high)


def smoothed(series: Series) -> Series:
    """From 80 points on a centered moving average over a twentieth of them, at up to 240 of the steps.

    Windows shrink at the ends instead of padding.
    """
    steps, values = series
    if len(values) < _SMOOTH_FROM:
        return series
    half = max(len(values) // 40, 1)
    total = np.concatenate([[0.0], np.cumsum(values)])
    # By step and not by place, so that seeds of one recipe keep the same steps even where one lacks some.
    every = max(1, int(steps[-1]) // _POINTS)
    index = np.flatnonzero((steps.astype(np.int64) % every == 0) | (steps == steps[-1]))
    start, end = np.maximum(index - half, 0), np.minimum(index + half + 1, len(values))
    return steps[index], (total[end] - total[start]) / (end - start)


def _bounds(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of (seeds, points): range or bootstrap interval of every point. The draws are the same every time."""
    seeds = len(table)
    if seeds < BOOTSTRAP_FROM:
        return table.min(axis=0), table.max(axis=0)
    draws = np.random.default_rng(0).multinomial(seeds, np.full(seeds, 1 / seeds), size=_RESAMPLES) / seeds
    low, high = np.quantile(draws @ table, _QUANTILES, axis=0)
    # Rounding must not give equal seeds an interval.
    return np.clip(low, table.min(axis=0), table.max(axis=0)), np.clip(high, table.min(axis=0), table.max(axis=0))
