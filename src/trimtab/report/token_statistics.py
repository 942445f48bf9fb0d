"""Token-level statistics of trajectory files, in numpy over flat arrays.

A flat array holds the tokens of all responses in order; response r is `values[starts[r]:starts[r + 1]]`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimtab.diagnosis.measure.bins import DECADES, FEWEST, PER_DECADE
from trimtab.diagnosis.tokens import DECILES


@dataclass(frozen=True, eq=False)
class Envelope:
    """Percentiles of the log-ratio in nats, each (bins,), over bins of the behavior probability in ascending order.

    Bins of fewer than `FEWEST` tokens are omitted; `thin` counts the tokens in them.
    """

    probability: np.ndarray
    low: np.ndarray
    median: np.ndarray
    high: np.ndarray
    count: np.ndarray
    thin: int


@dataclass(frozen=True, eq=False)
class Shift:
    """A histogram of changes of probability: counts (bins,) of magnitudes above 0 between `edges` (bins + 1,).

    unmoved: share of tokens without a change. upper_quartile: 75th percentile of the magnitude over all tokens.
    """

    edges: np.ndarray
    count: np.ndarray
    unmoved: float
    upper_quartile: float


@dataclass(frozen=True)
class Frequent:
    """A token id, its number of occurrences, and its mean entropy there in nats (NaN if unknown)."""

    id: int
    count: int
    entropy: float


def envelope(logp_behavior: np.ndarray, log_ratio: np.ndarray) -> Envelope:
    """Returns the 2nd, 50th and 98th percentile of log π − log μ, binned by μ (arXiv 2603.19470, Figures 1 and 2).

    Three bins per factor of ten; the lowest holds everything below 1e-5. A bin includes its upper edge.
    """
    depth = -np.minimum(logp_behavior.astype(np.float64), 0.0) / np.log(10) * PER_DECADE
    index = np.minimum(depth.astype(np.int64), PER_DECADE * DECADES - 1)
    counts = np.bincount(index, minlength=PER_DECADE * DECADES)
    kept = [bin_ for bin_ in range(len(counts))[::-1] if counts[bin_] >= FEWEST]
    values = [np.quantile(log_ratio[index == bin_], (0.02, 0.5, 0.98)) for bin_ in kept]
    low, median, high = np.array(values, dtype=np.float64).reshape(-1, 3).T
    centers = 10.0 ** (-(np.array(kept, dtype=np.float64) + 0.5) / PER_DECADE)
    thin = int(counts[counts < FEWEST].sum())
    return Envelope(centers, low, median, high, counts[kept], thin)


def pearson(x: np.ndarray, y: np.ndarray) -> float:
    """Returns the correlation of two arrays (count,); NaN when one is constant or has fewer than two entries."""
    # Tested on the range: a constant minus its rounded mean is not exactly 0 and would correlate perfectly.
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return float("nan")
    x, y = x.astype(np.float64), y.astype(np.float64)
    x, y = x - x.mean(), y - y.mean()
    return float((x * y).sum() / np.sqrt(np.square(x).sum() * np.square(y).sum()))


def shift(moved: np.ndarray, clean: np.ndarray, bins: int = 30) -> Shift:
    """Returns |p_perturbed − p_clean| of all tokens in logarithmic bins, and its 75th percentile."""
    size = np.abs(moved.astype(np.float64) - clean.astype(np.float64))
    above = size[size > 0]
    if len(above) == 0:
        return Shift(np.empty(0), np.empty(0, dtype=np.int64), 1.0, 0.0)
    # Equal magnitudes need bins of nonzero width.
    low, high = above.min(), max(above.max(), above.min() * 1.1)
    # The outer edges are widened, so that rounding cannot exclude the smallest and the largest value.
    edges = np.geomspace(low * (1 - 1e-9), high * (1 + 1e-9), bins + 1)
    count, _ = np.histogram(above, edges)
    return Shift(edges, count, 1.0 - len(above) / len(size), float(np.quantile(size, 0.75)))


def by_decile(decile: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Returns the mean of the values in each tenth (10,); NaN in a tenth without tokens."""
    count = np.bincount(decile, minlength=DECILES)
    total = np.bincount(decile, weights=values, minlength=DECILES)
    return np.divide(total, count, out=np.full(DECILES, np.nan), where=count > 0)


def at_level(log_ratio: np.ndarray, trained: np.ndarray, starts: np.ndarray, level: str) -> np.ndarray:
    """Returns the log-ratio at each token: its own, or the sum or mean over the trained tokens of its response."""
    if level == "token":
        return log_ratio
    rows = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    total = np.bincount(rows, weights=np.where(trained, log_ratio, 0.0), minlength=len(starts) - 1)
    if level == "geometric":
        total = total / np.maximum(np.bincount(rows, weights=trained, minlength=len(starts) - 1), 1)
    return total[rows]


def clipped(log_ratio: np.ndarray, advantage: np.ndarray, low: float, high: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns where clipping acts: A < 0 and r < low, and A > 0 and r > high; each (tokens,) bool."""
    with np.errstate(divide="ignore"):
        below, above = np.log(np.float64(low)), np.log(np.float64(high))
    return (advantage < 0) & (log_ratio < below), (advantage > 0) & (log_ratio > above)


def takeovers(version: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Returns the indices (cuts,) of tokens at which the policy version rises inside a response."""
    rises = np.flatnonzero(np.diff(version) > 0) + 1
    return rises[~np.isin(rises, starts)]


def most_frequent(ids: np.ndarray, entropy: np.ndarray | None, most: int) -> list[Frequent]:
    """Returns the `most` most frequent ids, ties by id, with their mean entropy."""
    unique, index, count = np.unique(ids, return_inverse=True, return_counts=True)
    total = np.full(len(unique), np.nan) if entropy is None else np.bincount(index, weights=entropy)
    ranked = np.lexsort((unique, -count))[:most]
    return [Frequent(int(unique[i]), int(count[i]), float(total[i] / count[i])) for i in ranked]
