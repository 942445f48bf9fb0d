"""Means over the seeds of one recipe, with intervals.

With five or more seeds the interval is the 95% confidence interval of the mean by Student's t. With fewer seeds it is
the range from the lowest to the highest value, which is not a confidence interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

STUDENT_FROM = 5  # seeds
# Seeds. Two ranges of two values each are disjoint by chance in one of three cases, of three values in one of ten.
SEPARABLE_FROM = 3
UNBOUNDED = (-math.inf, math.inf)


@dataclass(frozen=True)
class Interval:
    """The mean of `count` seeds and its interval. For a single seed `low` and `high` equal the mean."""

    mean: float
    low: float
    high: float
    count: int


def interval_method(seeds: int) -> str:
    """Returns the kind of interval that `seeds` seeds get, in words."""
    if seeds < 2:
        return "a single seed, no interval"
    return "95% interval of the mean (Student's t)" if seeds >= STUDENT_FROM else f"range of {seeds} seeds"


def interval(values: Sequence[float], limits: tuple[float, float] = UNBOUNDED) -> Interval | None:
    """Returns the mean of one value per seed with its interval, or None for no values.

    The interval is cut to `limits`, the range of possible values.
    """
    if not len(values):
        return None
    array = np.asarray(values, dtype=np.float64)
    mean, low, high = float(array.mean()), float(array.min()), float(array.max())
    if len(array) >= STUDENT_FROM and high > low:  # rounding must not give equal seeds an interval
        half = _student_quantile(len(array) - 1) * float(array.std(ddof=1)) / math.sqrt(len(array))
        low, high = max(mean - half, limits[0]), min(mean + half, limits[1])
    return Interval(mean, low, high, len(values))


def best(intervals: Sequence[Interval | None], *, highest: bool) -> int | None:
    """Returns the index of the interval that is disjoint from all others and better, or None.

    Returns None as well when any interval comes from fewer than three seeds.
    """
    known = [(index, item) for index, item in enumerate(intervals) if item is not None]
    if len(known) < 2 or any(item.count < SEPARABLE_FROM for _, item in known):
        return None
    sign = 1 if highest else -1
    ranked = sorted(known, key=lambda pair: -sign * pair[1].mean)
    (index, first), rest = ranked[0], ranked[1:]
    disjoint = all(first.low > item.high if highest else first.high < item.low for _, item in rest)
    return index if disjoint else None


def _student_quantile(degrees: int) -> float:
    """Returns the 97.5% quantile of Student's t distribution with `degrees` degrees of freedom.

    The error is below 1e-3 for four or more degrees: expansion around the normal quantile (Abramowitz and Stegun
    26.7.5).
    """
    z = 1.959964
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / degrees**power for power, term in enumerate(terms, start=1))
