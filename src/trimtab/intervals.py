"""For reports: 95% intervals of means over seeds and over problems, and of statistics over clusters of responses.

Seeds: Student's t interval of the mean for five or more seeds. For fewer, the range of the values, which is not a
confidence interval. (The percentile bootstrap of five seeds covers 84%.) `contenders` tells which methods may be best.

Problems: Wilson's score interval (Wilson 1927) at the effective number of problems, as for proportions in complex
samples (Kish 1965; Korn and Graubard 1998; Franco, Little, Louis and Slud 2019). Sums and differences of intervals are
combined by squares (Newcombe 1998; Zou and Donner 2008). Unlike bootstrap intervals, these have a width above 0 even if
all answers are right or all are wrong. benchmarks/intervals.py measures their coverage.

Clusters: the studentized bootstrap (Efron and Tibshirani 1993, ch. 12.5).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

if TYPE_CHECKING:
    from torch import Tensor

Z = NormalDist().inv_cdf(0.975)
STUDENT_FROM = 5  # seeds
PAIRED_FROM = 3  # seeds in common; with two, the differences are often equal, with a standard deviation of 0
UNBOUNDED = (-math.inf, math.inf)
RESAMPLES = 1000
FEWEST_CLUSTERS = 8
LEVEL, POWER = 0.95, 0.8

Statistics = Callable[["Tensor"], Mapping[str, "Tensor"]]
"""Maps sums (rows, fields) to named statistics (rows,) that a common factor of all sums does not change."""


class Interval(NamedTuple):
    """A statistic over problems or clusters with its 95% interval. `low` and `high` are NaN for too few clusters."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class SeedMean:
    """The mean of `count` seeds and its interval. For a single seed `low` and `high` equal the mean."""

    mean: float
    low: float
    high: float
    count: int


@cache
def student_quantile(degrees: int, level: float = 0.975) -> float:
    """Returns a quantile (`level` from .5 to 1 - 1e-6) of Student's t distribution, with an error below 1e-4.

    Integrates the density over u with t = sinh(u), which covers the long tail of one degree of freedom.
    """
    u = np.linspace(0.0, 20.0, 8001)
    t = np.sinh(u)
    density = np.exp(-(degrees + 1) / 2 * np.log1p(t * t / degrees)) * np.cosh(u)
    mass = np.cumsum(density) - (density + density[0]) / 2  # trapezoids
    return float(np.interp(2 * level - 1, mass / mass[-1], t))


def interval_method(seeds: int) -> str:
    """Returns the name of the interval that `seed_interval` computes for this number of seeds."""
    if seeds < 2:
        return "a single seed, no interval"
    return "95% interval of the mean (Student's t)" if seeds >= STUDENT_FROM else f"range of {seeds} seeds"


def seed_interval(values: Sequence[float], limits: tuple[float, float] = UNBOUNDED) -> SeedMean | None:
    """Returns the mean of one value per seed with its interval, or None for no values.

    The interval is cut to `limits`, the range of possible values.
    """
    if not len(values):
        return None
    array = np.asarray(values, dtype=np.float64)
    mean, low, high = float(array.mean()), float(array.min()), float(array.max())
    if len(array) >= STUDENT_FROM and high > low:  # rounding must not give equal seeds an interval
        half = student_quantile(len(array) - 1) * float(array.std(ddof=1)) / math.sqrt(len(array))
        low, high = max(mean - half, limits[0]), min(mean + half, limits[1])
    return SeedMean(mean, low, high, len(values))


def contenders(values: ArrayLike) -> list[bool]:
    """Returns whether each method may be the best. True ones include the best in at least 95% of experiments.

    A method is excluded if any other is significantly better in a one-sided t test of the differences paired by seed.
    The level is 5% divided by the number of other methods (Bonferroni), which accounts for choosing the best by the
    same seeds, as in subset selection (Gupta 1965). If all methods are equal, each stays with a probability of 95%.

    Args:
        values: (methods, seeds), NaN if a method has no run with a seed. A pair with fewer than three seeds in
            common is not compared.
    """
    data = np.asarray(values, dtype=np.float64)
    leads = data[None, :, :] - data[:, None, :]  # of the second index over the first
    known = np.isfinite(leads)
    counts = known.sum(-1)
    means = np.where(known, leads, 0.0).sum(-1) / np.maximum(counts, 1)
    squares = np.where(known, leads - means[..., None], 0.0) ** 2
    errors = np.sqrt(squares.sum(-1) / np.maximum(counts * (counts - 1), 1))
    leading = np.zeros_like(known[..., 0])
    for count in np.unique(counts[counts >= PAIRED_FROM]):
        leading |= (counts == count) & (means > _lead_quantile(int(count), len(data)) * errors)
    return [not any(row) for row in leading]


def may_be_best(by_seed: Sequence[Mapping[Any, float]]) -> list[bool]:
    """Returns `contenders` for one mapping per method, from seed to value."""
    seeds = dict.fromkeys(seed for values in by_seed for seed in values)
    table = [[values.get(seed, math.nan) for seed in seeds] for values in by_seed]
    return contenders(table) if table else []


def detectable_lead(differences: Sequence[float], methods: int) -> float:
    """Returns the lead that `contenders` with this number of methods detects with a probability of 80%.

    `differences` between two methods, one per seed, give the standard error. The lead in standard errors is the
    quantile of the test plus the 80% quantile of Student's t. NaN for fewer than two seeds.
    """
    count = len(differences)
    if count < 2:
        return math.nan
    reach = _lead_quantile(count, methods) + student_quantile(count - 1, POWER)
    return reach * float(np.std(differences, ddof=1)) / math.sqrt(count)


def _lead_quantile(seeds: int, methods: int) -> float:
    return student_quantile(seeds - 1, 1 - (1 - LEVEL) / max(methods - 1, 1))


def problem_interval(values: ArrayLike, max_effective: float) -> Interval:
    """Returns the mean over problems of values in [0, 1] with its 95% interval, for problems drawn at random.

    Args:
        values: one for each problem: right or wrong, or the share of its samples that are right, or its pass@k.
        max_effective: upper bound of the effective number of observations: all samples, as if independent.
    """
    data = np.asarray(values, dtype=np.float64)
    mean = float(data.mean())
    return Interval(mean, *wilson(mean, _effective_observations(data, mean, max_effective)))


def wilson(share: float, count: float, z: float = Z) -> tuple[float, float]:
    """Returns Wilson's score interval of a share seen in `count` independent observations; `z`: 1.96 for 95%."""
    scale = 1 + z * z / count
    center = (share + z * z / (2 * count)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return min(max(0.0, center - half), share), max(min(1.0, center + half), share)  # rounding must not pass the ends


def least_fall(before: float, after: float, count: float, z: float) -> float:
    """Returns the lower end of the interval of `before` - `after`, two shares of `count` observations (Newcombe)."""
    low, high = wilson(before, count, z)[0], wilson(after, count, z)[1]
    return before - after - math.hypot(before - low, high - after)


def macro_average(parts: Sequence[Interval]) -> Interval:
    """Returns the mean of independent estimates, each with the same weight (macro mean)."""
    count = len(parts)
    value = sum(part.value for part in parts) / count
    below = math.sqrt(sum((part.value - part.low) ** 2 for part in parts)) / count
    above = math.sqrt(sum((part.high - part.value) ** 2 for part in parts)) / count
    return Interval(value, value - below, value + above)


def _effective_observations(data: np.ndarray, mean: float, max_effective: float) -> float:
    """Returns the number of Bernoulli observations that would have this variance, at least one per problem.

    The number is scaled for a variance estimated from few problems, as in Korn and Graubard. If all answers are right
    or all are wrong, the correlation between samples of a problem is unknown: each problem then counts once.
    """
    count = len(data)
    if count == 1 or mean <= 0 or mean >= 1:
        return float(count)
    variance = float(data.var(ddof=1)) / count if data.max() > data.min() else 0.0  # 0, without rounding errors
    seen = mean * (1 - mean) / variance if variance > 0 else max_effective
    return min(max(seen * (Z / student_quantile(count - 1)) ** 2, float(count)), max(max_effective, float(count)))


def resampled(clusters: int, seed: int) -> np.ndarray:
    """Returns how often each cluster is drawn in each resample: (RESAMPLES, clusters) float64."""
    drawn = np.random.default_rng(seed).integers(0, clusters, (RESAMPLES, clusters))
    drawn += clusters * np.arange(RESAMPLES)[:, None]
    counts = np.bincount(drawn.reshape(-1), minlength=RESAMPLES * clusters)
    return counts.reshape(RESAMPLES, clusters).astype(np.float64)


def cluster_intervals(sums: np.ndarray, statistics: Statistics, seed: int) -> dict[str, Interval]:
    """Returns studentized bootstrap intervals from the sums (clusters, fields); NaN ends with too few clusters.

    The percentile interval of a mean ratio covers 88% instead of 95% with 8 clusters and 92% with 20, since ratios have
    long tails. Dividing each resample's deviation by its own standard error (Efron & Tibshirani 1993, ch. 12.5; here by
    the delta method over independent clusters) covers 94%.
    """
    clusters = len(sums)
    value, error = _with_errors(sums.sum(axis=0)[None], _squares(sums).sum(axis=0)[None], statistics)
    if clusters < 2:
        return {name: Interval(float(at[0]), float("nan"), float("nan")) for name, at in value.items()}
    # Deviations from the mean of n clusters underestimate the variance by (n - 1) / n.
    scale = np.sqrt(clusters / (clusters - 1))
    if clusters < FEWEST_CLUSTERS:
        quantile = student_quantile(clusters - 1)
        reach = dict.fromkeys(value, (-quantile, quantile))
    else:
        reach = _reach(sums, statistics, value, resampled(clusters, seed), scale)
    result: dict[str, Interval] = {}
    for name, (low, high) in reach.items():
        at, by = float(value[name][0]), float(error[name][0]) * scale
        # The reach is infinite if most resamples lack the few clusters that determine a statistic: the end is NaN.
        result[name] = Interval(at, *(at - end * by if np.isfinite(end) else float("nan") for end in (high, low)))
    return result


def _reach(
    sums: np.ndarray, statistics: Statistics, value: Mapping[str, Tensor], draws: np.ndarray, scale: float
) -> dict[str, tuple[float, float]]:
    """Returns the 2.5% and 97.5% quantile of the resamples' deviations, in standard errors."""
    drawn, errors = _with_errors(draws @ sums, draws @ _squares(sums), statistics)
    reach: dict[str, tuple[float, float]] = {}
    for name, at in drawn.items():
        off = (at - value[name]) / (errors[name] * scale)
        # 0 / 0: the statistic is equal in all resamples. x / 0 stays infinite, so that quantiles may be infinite.
        off = off.masked_fill(off.isnan(), 0.0).sort().values
        low, high = (float(off[round(level * (len(off) - 1))]) for level in (0.025, 0.975))
        reach[name] = (low, high)
    return reach


def _squares(sums: np.ndarray) -> np.ndarray:
    """Returns the products of all pairs of fields, (clusters, fields * fields)."""
    return (sums[:, :, None] * sums[:, None, :]).reshape(len(sums), -1)


def _with_errors(
    sums: np.ndarray, squares: np.ndarray, statistics: Statistics
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns statistics of each row of sums and standard errors, sqrt(sum over clusters of (gradient . sums)^2)."""
    import torch  # imported here: intervals over seeds and problems do not need it

    fields = sums.shape[1]
    products = torch.from_numpy(squares).reshape(-1, fields, fields)
    at = torch.from_numpy(sums).requires_grad_()
    values = statistics(at)
    errors: dict[str, Tensor] = {}
    for name, value in values.items():
        (slope,) = torch.autograd.grad(value.sum(), at, retain_graph=True)
        errors[name] = torch.einsum("bf,bfg,bg->b", slope, products, slope).clamp(min=0).sqrt()
    return {name: value.detach() for name, value in values.items()}, errors
