"""pass@k, and intervals of means over problems.

Intervals are Wilson's score intervals (Wilson 1927) at the effective number of problems, as for proportions in complex
samples (Kish 1965; Korn and Graubard 1998; Franco, Little, Louis and Slud 2019), and sums and differences of them are
put together by squares (Newcombe 1998; Zou and Donner 2008). Unlike the bootstrap's, they have a width where every
answer is right or every answer is wrong. benchmarks/intervals.py measures how often they hold the truth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from trimtab.errors import TrimtabError

LEVEL = 0.95
Z = NormalDist().inv_cdf((1 + LEVEL) / 2)


class Estimate(NamedTuple):
    """A mean over problems (and tasks), or a difference of two, with its 95% interval."""

    value: float
    low: float
    high: float


@lru_cache(maxsize=1 << 16)
def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate of P(at least one of k samples is right) from n samples of which c are (Chen et al. 2021).

    1 - C(n-c, k) / C(n, k). Raises `TrimtabError` unless 0 <= c <= n and 1 <= k <= n: for k > n it is undefined.
    """
    if not 0 <= c <= n:
        raise TrimtabError(f"pass@k: {c} correct of {n} samples is impossible")
    if not 1 <= k <= n:
        raise TrimtabError(
            f"pass@{k} needs at least {k} samples per problem and k >= 1, there are {n}; draw more samples"
        )
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def estimate(values: ArrayLike, independent: float) -> Estimate:
    """Mean over problems of values in [0, 1] with its 95% interval, for problems drawn at random.

    Args:
        values: one for each problem: right or wrong, or the share of its samples that are right, or its pass@k.
        independent: how many yes-or-no observations they would be at most, were no two samples of a problem alike.
    """
    data = np.asarray(values, dtype=np.float64)
    mean = float(data.mean())
    return Estimate(mean, *wilson(mean, _effective(data, mean, independent)))


def wilson(share: float, count: float) -> tuple[float, float]:
    """Wilson's 95% score interval of a share seen in `count` independent observations."""
    scale = 1 + Z * Z / count
    center = (share + Z * Z / (2 * count)) / scale
    half = Z / scale * math.sqrt(share * (1 - share) / count + Z * Z / (4 * count * count))
    return min(max(0.0, center - half), share), max(min(1.0, center + half), share)  # rounding must not pass the ends


def average(parts: Sequence[Estimate]) -> Estimate:
    """Mean of independent estimates, each with the same weight (macro mean)."""
    count = len(parts)
    value = sum(part.value for part in parts) / count
    below = math.sqrt(sum((part.value - part.low) ** 2 for part in parts)) / count
    above = math.sqrt(sum((part.high - part.value) ** 2 for part in parts)) / count
    return Estimate(value, value - below, value + above)


def difference(first: ArrayLike, second: ArrayLike, independent: float) -> Estimate:
    """Mean of first - second on the same problems; `independent` as for `estimate`, on either side.

    The correlation of the two sides over problems narrows it. It is taken (problems - 1) / problems of what was seen,
    so that some doubt is left where both sides have equal counts.
    """
    sides = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    one, two = (estimate(side, independent) for side in sides)
    a, b = (side - side.mean() for side in sides)
    spread, count = math.sqrt(float(a @ a) * float(b @ b)), len(a)
    alike = float(a @ b) / spread * (count - 1) / count if spread > 0 else 0.0
    value = one.value - two.value
    down, up = (one.value - one.low, two.high - two.value), (one.high - one.value, two.value - two.low)
    return Estimate(value, value - _joined(*down, alike), value + _joined(*up, alike))


def _joined(one: float, two: float, alike: float) -> float:
    return math.sqrt(max(0.0, one * one - 2 * alike * one * two + two * two))


def _effective(data: np.ndarray, mean: float, independent: float) -> float:
    """As many independent yes-or-no observations as have the variance of this mean: never fewer than problems.

    Scaled for a variance estimated from few problems, as in Korn and Graubard. Where all values are equal, all right
    or all wrong say nothing about how alike samples of a problem are: then each problem counts once.
    """
    count = len(data)
    if count == 1 or mean <= 0 or mean >= 1:
        return float(count)
    variance = float(data.var(ddof=1)) / count
    seen = mean * (1 - mean) / variance if variance > 0 else independent
    return min(max(seen * (Z / _student(count - 1)) ** 2, float(count)), max(independent, float(count)))


def _student(freedom: int) -> float:
    """The 97.5% quantile of Student's t by Cornish and Fisher (Abramowitz and Stegun 26.7.5), within 1% from 3 on."""
    terms = (
        Z,
        (Z**3 + Z) / 4,
        (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96,
        (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / 384,
    )
    return sum(term / freedom**power for power, term in enumerate(terms))
