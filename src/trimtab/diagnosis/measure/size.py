"""The size of the mismatch: figures with intervals, overall and per step, their floor, and the part that is staleness.

The figures are the same as of `trimtab.mismatch` (`SizeSums`). The floor is the k3 that rounding of the stored
log-probs causes (`RoundingDetector`).

The split (`DriftSums`). A token of age a was sampled from mu_v, version v on the sampler, and is scored by pi_P,
version P = v + a on the trainer. Its log-ratio is a sum of mismatch and staleness,

    log pi_P - log mu_v = (log pi_v - log mu_v) + (log pi_P - log pi_v).

At age 0 the second part is 0. Since k3 is unbiased for KL(mu_v || pi_P) on tokens of mu_v, and the KL is the mean of
minus that sum, the mean of k3 splits into the same two parts without a cross term.

Mismatch depends strongly on the behavior probability, whose distribution may differ between tokens of age 0 and others.
So the mismatch of older tokens is estimated by tokens of age 0 in the same bin of behavior probability. Most tokens are
nearly certain, and mismatch grows with -log p. So bins have equal ratios in -log p, four per factor of two: bins of a
third of a decade in p would count a fifth of the mismatch of rarer old tokens as staleness.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from trimtab.corrections.statistics import QUANTILES, Histogram, RatioStatistics
from trimtab.diagnosis.measure.trained_tokens import FIELDS, StepSums, TrainedTokens, octave, quantiles
from trimtab.diagnosis.records import DriftSplit, MismatchSize
from trimtab.intervals import FEWEST_CLUSTERS, Interval, cluster_intervals, resampled
from trimtab.objectives.state import Metrics
from trimtab.runs.metric_catalog import k3_range
from trimtab.text import short

_BIAS = 127
_DECIMALS = 6  # largest number of decimals that is coarser than float32
_MIN_VALUES = 20  # fewest nonzero values on a coarse grid for it to be detected


class RoundingDetector:
    """Detects the grid that the log-probs of a column were rounded to, from the grids that hold all values so far."""

    def __init__(self) -> None:
        self._bfloat16 = self._float16 = True
        self._decimals = 0
        self._exponents = np.zeros(256, dtype=np.int64)

    def add(self, values: np.ndarray) -> None:
        """Adds finite values, float32 (tokens,)."""
        bits = values.view(np.int32)
        self._bfloat16 = self._bfloat16 and not (bits & 0xFFFF).any()
        with np.errstate(over="ignore"):
            self._float16 = self._float16 and bool((values.astype(np.float16).astype(np.float32) == values).all())
        exact = values.astype(np.float64)
        while self._decimals <= _DECIMALS and (exact.round(self._decimals).astype(np.float32) != values).any():
            self._decimals += 1
        self._exponents += np.bincount((bits >> 23) & 0xFF, minlength=256)

    @property
    def grid(self) -> str:
        """Whole numbers, bfloat16, float16, `d decimals` or float32; the coarsest if the values lie on several."""
        grids = {"whole numbers": self._decimals == 0, "bfloat16": self._bfloat16, "float16": self._float16}
        if any(grids.values()) and self._exponents[1:].sum() >= _MIN_VALUES:
            return next(name for name, holds in grids.items() if holds)
        # If float32 itself is no finer than the decimals, every value seems to be rounded to them.
        fine = np.arange(256) - _BIAS - 23 < np.log2(10.0**-self._decimals) - 3
        if self._decimals <= _DECIMALS and (self._exponents * fine)[1:].sum() >= _MIN_VALUES:
            return f"{self._decimals} decimal{'s' if self._decimals > 1 else ''}"
        return "float32"

    @property
    def variance(self) -> float:
        """Mean square of the rounding error, assumed uniform within half a grid step on either side."""
        grid, exponent = self.grid, np.arange(256.0) - _BIAS
        if grid == "whole numbers" or grid.startswith(str(self._decimals)):
            step = np.full(256, 10.0**-self._decimals)
        elif grid == "float16":
            step = np.exp2(np.maximum(exponent - 10, -24.0))
        else:
            step = np.exp2(exponent - (7 if grid == "bfloat16" else 23))
        step[0] = 0.0  # zero is on every grid
        count = self._exponents.sum()
        return float((self._exponents * np.square(step)).sum() / (12 * count)) if count else 0.0


def rounding_floor(columns: Mapping[str, RoundingDetector]) -> tuple[float, str]:
    """Returns the k3 from rounding alone, which is half the sum of the columns' variances, and a sentence about it."""
    value = 0.5 * sum(column.variance for column in columns.values())
    stored = " and ".join(f"{name} is stored in {column.grid}" for name, column in columns.items())
    return value, f"{stored}: rounding alone makes a k3 of {short(value)}"


CLUSTERS = 2048  # largest number of clusters that are resampled; more are merged evenly
STEPS = 200
_ENOUGH = 30.0  # smallest effective number of sequences for which the interval of a mean of products is given

_SCALES: Mapping[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    **dict.fromkeys(("k1", "chi2_token"), (torch.clone, torch.clone)),
    **dict.fromkeys(("k2", "k3", "ratio_mean", "ppl_ratio", "ppl_train", "abs_diff_mean"), (torch.log, torch.exp)),
    **dict.fromkeys(("ess_token", "ess_seq"), (torch.logit, torch.sigmoid)),
    "pearson": (torch.atanh, torch.tanh),
}
"""Transformations, and their inverses, that make a statistic nearly normal and keep intervals inside its range."""


class SizeSums:
    """Accumulates the sums from which `MismatchSize` is computed."""

    def __init__(self) -> None:
        self._clusters = np.zeros((2 * CLUSTERS, len(FIELDS)))
        self._largest = np.full(3, -np.inf)
        self._histogram = _histogram(np.zeros(0))
        self._steps = StepSums(STEPS)
        self._columns = (RoundingDetector(), RoundingDetector())

    def add(self, tokens: TrainedTokens) -> None:
        table, index = tokens.table, tokens.places
        for column, values in zip(self._columns, (table.behavior, table.trainer), strict=True):
            column.add(values[index])
        bucket = (tokens.cluster % np.uint64(2 * CLUSTERS)).astype(np.int64)
        for field, values in enumerate(tokens.sums.T):
            self._clusters[:, field] += np.bincount(bucket, weights=values, minlength=2 * CLUSTERS)
        self._largest = np.maximum(self._largest, tokens.largest.max(axis=0))
        self._histogram = self._histogram + _histogram(tokens.log)
        if table.step is not None:
            step = tokens.per_response(table.step)
            largest = np.column_stack([tokens.largest, step, -step])
            self._steps.add(step, tokens.sums, largest, (tokens.rows, tokens.log_ratio_bin))

    def size(self, anchor: str) -> MismatchSize:
        """Returns the size of the mismatch. `anchor`: which log-probs are the trainer's, proximal or current."""
        clusters = self._clusters[self._clusters[:, 0] > 0]
        if len(clusters) > CLUSTERS:
            clusters = self._clusters[:CLUSTERS] + self._clusters[CLUSTERS:]
            clusters = clusters[clusters[:, 0] > 0]
        sums = torch.from_numpy(clusters.sum(axis=0))
        whole = _statistics(sums, torch.from_numpy(self._largest), self._histogram)
        figures = Metrics({"": whole}).finalize()
        value, note = rounding_floor(dict(zip(("logp_behavior", f"logp_{anchor}"), self._columns, strict=True)))
        return MismatchSize(
            mismatch=figures,
            intervals=_intervals(clusters, figures),
            floor=value,
            floor_note=note,
            verdict=judge_k3(figures["k3"], value, any(column.grid != "float32" for column in self._columns)),
            by_step=tuple(self.by_step()),
        )

    def by_step(self) -> list[dict[str, float]]:
        """Returns the figures of each step; with more than `STEPS` steps, neighbors share a row."""
        rows: list[dict[str, float]] = []
        for _, (sums, largest, histogram) in self._steps.rows():
            figures = _statistics(torch.from_numpy(sums), torch.from_numpy(largest[:3]), self._histogram).summary()
            ratios = np.exp(quantiles(histogram.astype(np.int64)[None], QUANTILES)[0]).tolist()
            *_, last_step, negated_first = largest
            row = {"step": float(-int(negated_first)), "step_last": float(last_step)}
            row |= {name: float(figures[name]) for name in _FIGURES}
            rows.append(row | dict(zip(_TAILS, ratios, strict=True)))
        return rows


_FIGURES = ("tokens", "sequences", "k1", "k3", "ess_token", "ess_seq", "ratio_mean", "pearson", "log_ratio_seq_max")
_TAILS = tuple(f"ratio_q{round(100 * level):02d}" for level in QUANTILES)


def judge_k3(k3: float, floor: float, coarse: bool) -> str:
    """Returns `rounding`, or the name of the range of k3 (`exact`, `dense`, `small-dense`, `moe`, `beyond`).

    Up to twice the floor counts as rounding, since the floor assumes independent errors of both columns.
    """
    if coarse and k3 <= 2 * floor:
        return "rounding"
    return k3_range(k3).name


def _intervals(clusters: np.ndarray, figures: Mapping[str, float]) -> dict[str, Interval]:
    enough = figures["ess_seq"] * figures["sequences"] >= _ENOUGH
    names = [name for name in _SCALES if enough or name != "ess_seq"]
    if not enough:
        clusters = clusters.copy()
        clusters[:, [FIELDS.index("product"), FIELDS.index("product_square")]] = 1.0

    def statistics(sums: Tensor) -> dict[str, Tensor]:
        values = _statistics(sums, torch.zeros(3), _EMPTY).summary()
        return {name: _SCALES[name][0](values[name]) for name in names}

    with np.errstate(over="ignore", invalid="ignore"):  # ratios of broken data; such an interval is not finite
        intervals = cluster_intervals(clusters, statistics, seed=0)
    return {name: _transform_back(name, figures[name], intervals[name]) for name in names}


def _transform_back(name: str, value: float, scaled: Interval) -> Interval:
    """Transforms an interval back. A statistic at the end of its range (k3 = 0) is infinite on its scale."""
    if np.isinf(scaled.value):
        return Interval(value, value, value)
    low, high = (float(_SCALES[name][1](torch.tensor(end, dtype=torch.float64))) for end in (scaled.low, scaled.high))
    return Interval(value, low, high)


def _statistics(sums: Tensor, largest: Tensor, histogram: Histogram) -> RatioStatistics:
    """Returns the statistics of `trimtab.mismatch` from sums (..., FIELDS); all but the quantiles are (...,)."""
    columns = dict(zip(FIELDS, sums.unbind(-1), strict=True))
    most, least, product = largest
    extremes = {"log_max": most, "log_min": -least, "product_log_max": product}
    return RatioStatistics(**columns, **extremes, histogram=histogram.counts)


def _histogram(log: np.ndarray) -> Histogram:
    values = torch.from_numpy(log).to(torch.float32)
    return Histogram.of(values, torch.ones_like(values, dtype=torch.bool))


_EMPTY = _histogram(np.zeros(0))


_FEWEST_FRESH = 100
"""Fewest tokens of age 0 in a bin of behavior probability; bins with fewer are merged with their neighbor."""
_NEAR = 5  # bins in a row that are searched for tokens of age 0 before the middle one counts as having none
_MAX_UNMATCHED = 0.05
"""Largest share of k3 in bins without tokens of age 0, which are compared with the nearest bins that have some."""
_SMALLEST, _LARGEST = -10, 4  # range of -log p, as powers of two
_COARSER = 3  # bits of `octave` that are dropped: 4 bins per factor of two instead of 32
_BINS = ((_LARGEST - _SMALLEST) << (5 - _COARSER)) + 1
_NAMES = ("mismatch", "staleness")


class DriftSums:
    """Sums per cluster, age (0 or older) and bin of behavior probability: tokens and k3."""

    def __init__(self) -> None:
        self._sums = np.zeros((2, CLUSTERS, 2, _BINS))
        self._unavailable_reason = "there is no trained token"
        self._newer = 0
        self._youngest = np.iinfo(np.int64).max

    def add(self, tokens: TrainedTokens) -> None:
        if tokens.table.age is None:
            absent = "policy_version" if tokens.table.version is None else "proximal_version"
            self._unavailable_reason = f"the data has no {absent}, so which tokens are of age 0 is unknown"
            return
        age = tokens.at_tokens(tokens.table.age)
        self._newer += int((age < 0).sum())
        self._youngest = min(self._youngest, int(age.min()))
        bucket = (tokens.cluster % np.uint64(CLUSTERS)).astype(np.int64)[tokens.rows]
        surprise = octave(np.maximum(-tokens.behavior, 0.0).astype(np.float32), _SMALLEST) >> _COARSER
        rare_first = _BINS - 1 - np.clip(surprise + 1, 0, _BINS - 1).astype(np.int64)
        index = (2 * bucket + (age != 0)) * _BINS + rare_first
        for at, values in enumerate((None, tokens.k3)):
            sums = np.bincount(index, weights=values, minlength=self._sums[0].size)
            self._sums[at] += sums.reshape(self._sums[0].shape)

    def split(self) -> DriftSplit:
        count = self._sums[0].sum(axis=0)  # (2, bins)
        if not count.sum():
            return DriftSplit(False, self._unavailable_reason)
        if self._newer:
            return DriftSplit(False, f"{self._newer} tokens are newer than proximal_version: the versions do not fit")
        if count[0].sum() < _FEWEST_FRESH:
            fresh = f"{int(count[0].sum())} tokens are of age 0 (the youngest is {self._youngest} updates old)"
            return DriftSplit(False, f"{fresh}; {_FEWEST_FRESH} are needed")
        lonely = np.convolve(count[0], np.ones(_NEAR), "same") < _FEWEST_FRESH
        older, k3 = self._sums[1, :, 1].sum(axis=0), self._sums[1].sum()
        if older[lonely].sum() > _MAX_UNMATCHED * k3:
            share = f"{older[lonely].sum() / k3:.0%} of k3"
            return DriftSplit(
                False, f"{share} lies at behavior probabilities with fewer than {_FEWEST_FRESH} tokens of age 0"
            )
        starts = _merge_bins(count[0])
        merged = np.add.reduceat(self._sums, starts, axis=-1)
        clusters = merged[:, merged[0].sum(axis=(1, 2)) > 0]
        value = _split_k3(clusters.sum(axis=1)[:, None])[:, 0]
        share = count[0].sum() / count.sum()
        why = (
            f"{share:.1%} of the tokens are of age 0; their k3 in {len(starts)} bins of behavior probability stands "
            f"for the mismatch of all tokens"
        )
        if share == 1:
            why = "every token is of age 0, so all drift is mismatch"
        return DriftSplit(True, why, float(value[0]), float(value[1]), _split_intervals(clusters, value))


def _merge_bins(fresh: np.ndarray) -> np.ndarray:
    """Returns the first bin of each group of bins with `_FEWEST_FRESH` tokens of age 0, from likely tokens down."""
    starts, have = [], 0.0
    for bin_ in range(len(fresh))[::-1]:
        have += fresh[bin_]
        if have >= _FEWEST_FRESH:
            starts.append(bin_)
            have = 0.0
    starts[-1] = 0
    return np.array(starts[::-1])


def _split_k3(sums: np.ndarray) -> np.ndarray:
    """Returns mismatch and staleness (2, any) from sums (2, any, 2, bins)."""
    whole, fresh = sums.sum(axis=2), sums[:, :, 0]
    tokens = whole[0].sum(axis=-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        # The mean over all tokens if each token had the mean of age 0 in its bin. If every token is of age 0, the
        # factor is exactly 1, and staleness exactly 0.
        matched = np.where(whole[0] > 0, fresh[1] * (whole[0] / fresh[0]), 0.0).sum(axis=-1) / tokens
        total = whole[1].sum(axis=-1) / tokens
    return np.stack([matched, total - matched])


def _split_intervals(clusters: np.ndarray, value: np.ndarray) -> dict[str, Interval]:
    """Returns percentile intervals over clusters; empty with too few clusters."""
    fields, count = clusters.shape[0], clusters.shape[1]
    if count < FEWEST_CLUSTERS:
        return {}
    draws = resampled(count, seed=0) @ np.moveaxis(clusters, 1, 0).reshape(count, -1)
    drawn = _split_k3(np.moveaxis(draws.reshape(-1, fields, *clusters.shape[2:]), 0, 1))
    # A resample without a token of age 0 in some bin is NaN and skipped.
    low, high = np.nanquantile(drawn, (0.025, 0.975), axis=1)
    return dict(zip(_NAMES, map(Interval, value.tolist(), low.tolist(), high.tolist()), strict=True))
