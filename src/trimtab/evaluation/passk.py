"""pass@k, and how sure a mean over problems is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trimtab.errors import TrimtabError

RESAMPLES = 2000
LEVEL = 0.95
BLOCK = 1 << 20  # drawn problems held at a time


class Estimate(NamedTuple):
    """A mean over problems (and tasks) with its 95% bootstrap interval over problems."""

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


def bootstrap(values: Sequence[float], *, seed: int, level: float = LEVEL) -> tuple[float, float]:
    """Percentile interval of the mean when problems are drawn again with replacement; deterministic by `seed`."""
    low, high = np.quantile(_resampled_means(np.asarray(values, dtype=np.float64), seed, 0), _tails(level))
    return float(low), float(high)


def estimates(tasks: Sequence[ArrayLike], *, seed: int) -> list[Estimate]:
    """Means over tasks of means over problems, one for each column, with intervals.

    Args:
        tasks: for each task an array (problems, columns). Every task weighs the same, however many problems it has
            (macro mean). Problems are drawn again within their task, independently between tasks; all columns share
            the draws, so the interval of a column of differences is the paired one.
        seed: equal seeds give equal intervals.
    """
    arrays = [np.asarray(task, dtype=np.float64) for task in tasks]
    values = np.mean([array.mean(axis=0) for array in arrays], axis=0)
    # A seed for each task: with one for all, tasks of equal size would be resampled in lockstep.
    means = np.mean([_resampled_means(array, seed, number) for number, array in enumerate(arrays)], axis=0)
    lows, highs = np.quantile(means, _tails(LEVEL), axis=0)
    return [Estimate(*map(float, column)) for column in zip(values, lows, highs, strict=True)]


def _resampled_means(data: NDArray[np.float64], *seed: int) -> NDArray[np.float64]:
    """(problems, ...) -> (resamples, ...)."""
    rng, count = np.random.default_rng(seed), len(data)
    block = max(1, BLOCK // count)
    means = []
    for first in range(0, RESAMPLES, block):
        rows = min(block, RESAMPLES - first)
        drawn = rng.integers(count, size=(rows, count)) + count * np.arange(rows)[:, None]
        # How often each problem was drawn, then one matrix product: no copy of the data for each resample.
        times = np.bincount(drawn.ravel(), minlength=rows * count).reshape(rows, count)
        means.append(times @ data / count)
    return np.concatenate(means)


def _tails(level: float) -> list[float]:
    return [(1 - level) / 2, (1 + level) / 2]
