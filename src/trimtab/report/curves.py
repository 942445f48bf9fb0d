"""Curves over steps: the mean and range of several seeds, and trailing means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

Series = tuple[np.ndarray, np.ndarray]
AVERAGED_FROM = 400  # points; below, the eye averages better than a number does
_BAND_POINTS = 480


@dataclass(frozen=True, eq=False)
class Band:
    """Mean and interval over `steps`; each array (steps,) float64."""

    steps: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def band(series: Sequence[Series]) -> Band | None:
    """Mean and range over the steps all seeds have: a mean of those that lasted would show the survivors. None when
    there are none."""
    if not series:
        return None
    steps = reduce(np.intersect1d, [steps for steps, _ in series])
    if not len(steps):
        return None
    table = np.stack([values[np.isin(own, steps)] for own, values in series])
    return Band(steps, table.mean(axis=0), table.min(axis=0), table.max(axis=0))


def thinned(found: Band) -> Band:
    """At most 480 points, for a filled area whose file would grow with the run: of each group of neighbors the mean,
    the lowest and the highest, so that nothing sticks out of it."""
    size = -(-len(found.steps) // _BAND_POINTS)
    if size == 1:
        return found
    starts = np.arange(0, len(found.steps), size)
    counts = np.diff(np.append(starts, len(found.steps)))
    return Band(
        found.steps[starts],
        np.add.reduceat(found.mean, starts) / counts,
        np.minimum.reduceat(found.low, starts),
        np.maximum.reduceat(found.high, starts),
    )


def trailing(series: Series) -> Series:
    """From 400 points on, the mean of the last twentieth of the points up to each (fewer at the start).

    It looks back only: no event is seen before it happens. A shorter series stays as it is.
    """
    steps, values = series
    if len(values) < AVERAGED_FROM:
        return series
    total = np.concatenate([[0.0], np.cumsum(values)])
    end = np.arange(1, len(values) + 1)
    start = np.maximum(end - len(values) // 20, 0)
    return steps, (total[end] - total[start]) / (end - start)
