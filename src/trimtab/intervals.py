"""Means over the seeds of one recipe with intervals.

From five seeds on, the interval of a table is the 95% interval of the mean by Student's t. Fewer seeds say too little
for that; there it runs from the lowest seed to the highest, which is a range and no confidence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

STUDENT_FROM = 5  # seeds
SEPARABLE_FROM = 3  # seeds; two ranges of two lie apart by chance in one of three cases, of three in one of ten
ANYTHING = (-math.inf, math.inf)


@dataclass(frozen=True)
class Interval:
    """Mean of `count` seeds and the interval around it; a single seed has none (`low` and `high` are its value)."""

    mean: float
    low: float
    high: float
    count: int


def rule(seeds: int) -> str:
    """What the interval of so many seeds is, in words."""
    if seeds < 2:
        return "a single seed, no interval"
    return "95% interval of the mean (Student's t)" if seeds >= STUDENT_FROM else f"range of {seeds} seeds"


def interval(values: Sequence[float], limits: tuple[float, float] = ANYTHING) -> Interval | None:
    """Of one number for each seed; None without any. It is cut to `limits`, between which all such numbers lie."""
    if not len(values):
        return None
    table = np.asarray(values, dtype=np.float64)
    mean, low, high = float(table.mean()), float(table.min()), float(table.max())
    if len(table) >= STUDENT_FROM and high > low:  # rounding must not give equal seeds an interval
        half = _student(len(table) - 1) * float(table.std(ddof=1)) / math.sqrt(len(table))
        low, high = max(mean - half, limits[0]), min(mean + half, limits[1])
    return Interval(mean, low, high, len(values))


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


def _student(freedom: int) -> float:
    """The 97.5% quantile of Student's t, to 1e-3 from four degrees of freedom on: its expansion around the normal one
    (Abramowitz and Stegun 26.7.5)."""
    z = 1.959964
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, start=1))
