"""The size of the mismatch: the statistics of `trimtab.mismatch` with intervals, overall and per step, and its floor.

The floor is the k3 that comes from the rounding the log-probs were stored with (`RoundingDetector`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from trimtab.corrections.statistics import QUANTILES, Histogram, RatioStatistics
from trimtab.diagnosis.measure.trained_tokens import FIELDS, KeyedSums, TrainedTokens, quantiles
from trimtab.diagnosis.records import MismatchSize
from trimtab.intervals import Interval, cluster_intervals
from trimtab.objectives.metrics import Metrics
from trimtab.runs.metric_catalog import k3_range

_BIAS = 127
_DECIMALS = 6
"""Largest number of decimals that is coarser than float32."""
_MIN_VALUES = 20
"""Fewest nonzero values on a coarse grid for it to be detected."""
_FIRST_PART = 4096  # values tested first, which rule out most grids


class RoundingDetector:
    """Detects the grid of one column of log-probs: the grids that contain all values so far, and their exponents."""

    def __init__(self) -> None:
        self._bfloat16 = self._float16 = True
        self._decimals = 1
        self._exponents = np.zeros(256, dtype=np.int64)

    def add(self, values: np.ndarray) -> None:
        """Adds finite values, float32 (tokens,)."""
        for part in (values[:_FIRST_PART], values[_FIRST_PART:]):
            bits = part.view(np.int32)
            self._bfloat16 = self._bfloat16 and not (bits & 0xFFFF).any()
            with np.errstate(over="ignore"):
                self._float16 = self._float16 and bool((part.astype(np.float16).astype(np.float32) == part).all())
            exact = part.astype(np.float64)
            while self._decimals <= _DECIMALS and (exact.round(self._decimals).astype(np.float32) != part).any():
                self._decimals += 1
        self._exponents += np.bincount((values.view(np.int32) >> 23) & 0xFF, minlength=256)

    @property
    def grid(self) -> str:
        """bfloat16, float16, `d decimals` or float32; the coarsest if the values lie on several."""
        if self._bfloat16 and self._exponents[1:].sum() >= _MIN_VALUES:
            return "bfloat16"
        if self._float16 and self._exponents[1:].sum() >= _MIN_VALUES:
            return "float16"
        # Where float32 itself is no finer than the decimals, every value seems to have been rounded to them.
        fine = np.arange(256) - _BIAS - 23 < np.log2(10.0**-self._decimals) - 3
        if self._decimals <= _DECIMALS and (self._exponents * fine)[1:].sum() >= _MIN_VALUES:
            return f"{self._decimals} decimal{'s' if self._decimals > 1 else ''}"
        return "float32"

    @property
    def variance(self) -> float:
        """Mean square of the rounding error, assumed uniform within half a grid step on either side."""
        grid, exponent = self.grid, np.arange(256.0) - _BIAS
        if grid.startswith(str(self._decimals)):
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
    return value, f"{stored}: rounding alone makes a k3 of {value:.1e}"


CLUSTERS = 2048
"""Largest number of clusters that are resampled; more are merged evenly."""
STEPS = 200
_ENOUGH = 30.0
"""Smallest effective number of sequences for which the interval of a mean of products is given."""

_SHARE = (torch.logit, torch.sigmoid)
_POSITIVE = (torch.log, torch.exp)
_SCALES: Mapping[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "k1": (torch.clone, torch.clone),
    "k2": _POSITIVE,
    "k3": _POSITIVE,
    "chi2_token": (torch.clone, torch.clone),
    "ess_token": _SHARE,
    "ratio_mean": _POSITIVE,
    "ppl_ratio": _POSITIVE,
    "ppl_train": _POSITIVE,
    "pearson": (torch.atanh, torch.tanh),
    "abs_diff_mean": _POSITIVE,
    "ess_seq": _SHARE,
}
"""Transformations, and their inverses, that make a statistic nearly normal and keep intervals inside its range."""


class SizeSums:
    """Accumulates the sums from which `MismatchSize` is computed."""

    def __init__(self) -> None:
        self._clusters = np.zeros((2 * CLUSTERS, len(FIELDS)))
        self._largest = np.full(3, -np.inf)
        self._histogram = _histogram(np.zeros(0))
        self._steps = KeyedSums(STEPS)
        self._columns = (RoundingDetector(), RoundingDetector())

    def add(self, tokens: TrainedTokens) -> None:
        table, index = tokens.table, tokens.places
        for column, values in zip(self._columns, (table.behavior, table.trainer), strict=True):
            column.add(values[index])
        if not len(tokens):
            return
        bucket = (tokens.cluster % np.uint64(2 * CLUSTERS)).astype(np.int64)
        for field, values in enumerate(tokens.sums.T):
            self._clusters[:, field] += np.bincount(bucket, weights=values, minlength=2 * CLUSTERS)
        self._largest = np.maximum(self._largest, tokens.largest.max(axis=0))
        self._histogram = self._histogram + _histogram(tokens.log)
        if table.step is not None:
            step = tokens.per_response(table.step)
            largest = np.column_stack([tokens.largest, step, -step])
            keys = np.column_stack([step, np.zeros_like(step)])
            self._steps.add(keys, tokens.sums, largest, (tokens.rows, tokens.log_ratio_bin))

    def size(self, anchor: str, seed: int) -> MismatchSize:
        """Returns the size of the mismatch. `anchor`: which log-probs are the trainer's, proximal or current."""
        clusters = self._clusters[self._clusters[:, 0] > 0]
        if len(clusters) > CLUSTERS:
            clusters = self._clusters[:CLUSTERS] + self._clusters[CLUSTERS:]
            clusters = clusters[clusters[:, 0] > 0]
        sums = torch.from_numpy(clusters.sum(axis=0))
        whole = _statistics(sums, torch.from_numpy(self._largest), self._histogram)
        figures = Metrics({"": whole}).finalize()
        columns = dict(zip(("logp_behavior", f"logp_{anchor}"), self._columns, strict=True))
        value, note = rounding_floor(columns)
        return MismatchSize(
            mismatch=figures,
            intervals=_intervals(clusters, figures, seed),
            floor=value,
            floor_note=note,
            verdict=verdict(figures["k3"], value, any(column.grid != "float32" for column in self._columns)),
            by_step=tuple(self.by_step()),
        )

    def by_step(self) -> list[dict[str, float]]:
        """Returns the figures of each step; of more than `STEPS`, neighbors share a row."""
        rows: list[dict[str, float]] = []
        for _, (sums, largest, histogram) in self._steps.rows():
            figures = _statistics(torch.from_numpy(sums), torch.from_numpy(largest[:3]), self._histogram).summary()
            ratios = np.exp(quantiles(histogram.astype(np.int64)[None], QUANTILES)[0]).tolist()
            *_, last_step, negated_first = largest
            row = {"step": float(-int(negated_first)), "step_last": float(last_step)}
            row |= {name: float(figures[name]) for name in _STEP_FIGURES}
            rows.append(row | dict(zip(_TAILS, ratios, strict=True)))
        return rows


_STEP_FIGURES = (
    *("tokens", "sequences", "k1", "k3", "ess_token", "ess_seq", "ratio_mean", "pearson", "log_ratio_seq_max"),
)
_TAILS = tuple(f"ratio_q{round(100 * level):02d}" for level in QUANTILES)


def verdict(k3: float, floor: float, coarse: bool) -> str:
    """Returns `rounding`, or the name of the range of k3 (`exact`, `dense`, `small-dense`, `moe`, `beyond`).

    Up to twice the floor counts as rounding, since the floor assumes independent errors of both columns.
    """
    if coarse and k3 <= 2 * floor:
        return "rounding"
    return k3_range(k3).name


def _intervals(clusters: np.ndarray, figures: Mapping[str, float], seed: int) -> dict[str, Interval]:
    enough = figures["ess_seq"] * figures["sequences"] >= _ENOUGH
    names = [name for name in _SCALES if enough or name != "ess_seq"]
    if not enough:
        clusters = clusters.copy()
        clusters[:, [FIELDS.index("product"), FIELDS.index("product_square")]] = 1.0

    def statistics(sums: Tensor) -> dict[str, Tensor]:
        values = _statistics(sums, torch.zeros(3), _EMPTY).summary()
        return {name: _SCALES[name][0](values[name]) for name in names}

    with np.errstate(over="ignore", invalid="ignore"):  # ratios of broken data; such an interval is not finite
        intervals = cluster_intervals(clusters, statistics, seed)
    return {name: _unscaled(name, figures[name], intervals[name]) for name in names}


def _unscaled(name: str, value: float, scaled: Interval) -> Interval:
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
