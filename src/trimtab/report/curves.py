"""Curves over steps: mean and range of several seeds, and trailing means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

Series = tuple[np.ndarray, np.ndarray]
AVERAGED_FROM = 400  # points from which a trailing mean is drawn; shorter curves are readable as logged
_BAND_POINTS = 480


@dataclass(frozen=True, eq=False)
class Band:
    """Mean and range over `steps`; each array is (steps,) float64."""

    steps: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def band(series: Sequence[Series]) -> Band | None:
    """Returns mean and range over the steps that all seeds have, or None without any.

    Later steps are left out: a mean over the remaining seeds would be biased towards runs that did not stop early.
    """
    if not series:
        return None
    steps = reduce(np.intersect1d, [steps for steps, _ in series])
    if not len(steps):
        return None
    table = np.stack([values[np.isin(seed_steps, steps)] for seed_steps, values in series])
    return Band(steps, table.mean(axis=0), table.min(axis=0), table.max(axis=0))


def thinned(band: Band) -> Band:
    """Returns the band with at most 480 points, which bounds the size of the SVG.

    Each point is the mean, the lowest and the highest value of a group of neighbors.
    """
    size = -(-len(band.steps) // _BAND_POINTS)
    if size == 1:
        return band
    starts = np.arange(0, len(band.steps), size)
    counts = np.diff(np.append(starts, len(band.steps)))
    return Band(
        band.steps[starts],
        np.add.reduceat(band.mean, starts) / counts,
        np.minimum.reduceat(band.low, starts),
        np.maximum.reduceat(band.high, starts),
    )


def trailing(series: Series) -> Series:
    """Returns the trailing mean of a series of 400 points or more; a shorter series is returned unchanged.

    The window is a twentieth of the points (fewer at the start) and ends at each point.
    """
    steps, values = series
    if len(values) < AVERAGED_FROM:
        return series
    total = np.concatenate([[0.0], np.cumsum(values)])
    end = np.arange(1, len(values) + 1)
    start = np.maximum(end - len(values) // 20, 0)
    return steps, (total[end] - total[start]) / (end - start)
