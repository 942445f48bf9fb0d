"""Draws curves over steps: of one run, or of groups of runs as means with bands over their seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
from matplotlib.axes import Axes

from trimtab.pages.charts import CYCLE, STYLES, Dashes, log_scale_of_any_sign, start_at_zero

AVERAGED_FROM = 400  # points from which a trailing mean is drawn; shorter curves are readable as logged
_BAND_POINTS = 480
Series = tuple[np.ndarray, np.ndarray]
"""Steps and values of a curve, (count,) each."""


@dataclass(frozen=True, eq=False)
class Curve:
    """A metric of a run, or of the runs of a group."""

    label: str  # in the legend; "_" for none
    seeds: Sequence[Series]  # one series per run


@dataclass(frozen=True, eq=False)
class Spread:
    """Mean and range over `steps`; each array is (steps,) float64."""

    steps: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def draw_curves(
    axes: Axes,
    curves: Sequence[Curve],
    *,
    log: bool = False,
    points: bool = False,
    averaged: bool = True,
    bands: bool = True,
    top: float | None = None,
) -> None:
    """Draws the mean over seeds of each curve, and its band; below a trailing mean, the logged values as a thin line.

    Args:
        log: use a logarithmic axis, where nothing is averaged: the largest value would dominate the mean.
        points: mark every point.
        averaged: draw the trailing mean of long curves.
        bands: draw the band from the lowest seed to the highest.
        top: the end of the y-axis if all curves are 0.
    """
    for index, curve in enumerate(curves):
        spread = spread_of(curve.seeds)
        if spread is None:
            continue
        (color, style), width = line_style(index), 1.5
        if len(spread.steps) >= AVERAGED_FROM:
            if averaged and not log:
                axes.plot(spread.steps, spread.mean, color=color, linewidth=0.7, alpha=0.55)
                spread = spread_of([trailing(series) for series in curve.seeds]) or spread
            else:
                width = 1.0
        if bands and len(curve.seeds) > 1:
            band = thinned(spread)
            axes.fill_between(band.steps, band.low, band.high, color=color, alpha=0.15, linewidth=0)
        marker = "o" if points or len(spread.steps) < 4 else None
        form = {"color": color, "linestyle": style, "linewidth": width, "marker": marker, "markersize": 4}
        axes.plot(spread.steps, spread.mean, label=curve.label, **form)
    # A logarithmic axis cannot show curves that are zero throughout.
    if log and any(np.any(line.get_ydata()) for line in axes.lines):
        log_scale_of_any_sign(axes)
    else:
        start_at_zero(axes, top)


def line_style(index: int) -> tuple[str, Dashes]:
    """Returns the color and the line style of a curve. Styles shift when the six colors repeat: 36 curves differ."""
    return CYCLE[index % len(CYCLE)], STYLES[(index + index // len(CYCLE)) % len(STYLES)]


def spread_of(seeds: Sequence[Series]) -> Spread | None:
    """Returns the mean and range over seeds at the steps that all seeds have, or None if there are no such steps.

    Later steps are left out: a mean over the remaining seeds would be biased towards runs that did not stop early.
    """
    steps = reduce(np.intersect1d, [steps for steps, _ in seeds]) if seeds else ()
    if not len(steps):
        return None
    table = np.stack([values[np.isin(seed_steps, steps)] for seed_steps, values in seeds])
    return Spread(steps, table.mean(axis=0), table.min(axis=0), table.max(axis=0))


def thinned(band: Spread) -> Spread:
    """Returns the band with at most 480 points, to bound the size of the SVG.

    Each point has the mean, minimum and maximum of a group of neighboring steps.
    """
    size = -(-len(band.steps) // _BAND_POINTS)
    if size == 1:
        return band
    starts = np.arange(0, len(band.steps), size)
    counts = np.diff(np.append(starts, len(band.steps)))
    return Spread(
        band.steps[starts],
        np.add.reduceat(band.mean, starts) / counts,
        np.minimum.reduceat(band.low, starts),
        np.maximum.reduceat(band.high, starts),
    )


def trailing(series: Series) -> Series:
    """Returns the trailing mean of a series of 400 points or more; returns a shorter series unchanged.

    The window of each point ends at the point and has a twentieth of all points (fewer at the start).
    """
    steps, values = series
    if len(values) < AVERAGED_FROM:
        return series
    total = np.concatenate([[0.0], np.cumsum(values)])
    end = np.arange(1, len(values) + 1)
    start = np.maximum(end - len(values) // 20, 0)
    return steps, (total[end] - total[start]) / (end - start)
