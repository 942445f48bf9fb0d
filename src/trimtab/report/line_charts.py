"""Charts of one run over its steps, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from trimtab.pages.svg import (
    BLUE,
    CYCLE,
    GREEN,
    INK,
    RC,
    SKY,
    STYLES,
    VERMILLION,
    finish,
    log_scale,
    log_scale_of_both_signs,
    log_scale_with_zero,
    to_svg,
)
from trimtab.report.chart_specs import ResolvedChart
from trimtab.report.curves import AVERAGED_FROM, trailing
from trimtab.runs.metric_catalog import Metric
from trimtab.runs.reader import Run


@dataclass(frozen=True, eq=False)
class Curve:
    """One labelled series, both arrays (count,)."""

    label: str
    steps: np.ndarray
    values: np.ndarray


def draw_chart(drawn: ResolvedChart, run: Run) -> str:
    """Returns the chart of one run as an `<svg>` element."""
    chart = drawn.chart
    with mpl.rc_context(RC):
        figure = Figure(figsize=(4.2, 2.5), layout="constrained")
        axes = figure.add_subplot()
        if chart.kind == "quantiles":
            _draw_quantiles(axes, [run.series(key) for _, key in drawn.lines])
        elif chart.kind == "layers":
            _draw_layers(axes, _read_curves(drawn, run))
        else:
            _draw_curves(
                axes, _read_curves(drawn, run), log=chart.log, points=chart.kind == "accuracy", top=chart.caption.high
            )
        if chart.bound:
            _draw_bound(axes, chart.bound, run)
        if chart.kind == "accuracy":
            axes.set_ylim(0, 1)
        elif chart.shade:
            _shade_healthy(axes, chart.caption)
        finish(figure, axes)
        return to_svg(figure, chart.title)


def _read_curves(drawn: ResolvedChart, run: Run) -> list[Curve]:
    if drawn.chart.kind == "accuracy":
        return [Curve(task, accuracy.steps, accuracy.values) for task, accuracy in run.accuracy().items()]
    return [Curve(label, *run.series(key)) for label, key in drawn.lines]


def _draw_curves(axes: Axes, curves: Sequence[Curve], *, log: bool, points: bool, top: float | None) -> None:
    """Draw the curves; `top` is the end of the axis if all curves are 0 throughout."""
    for index, curve in enumerate(curves):
        color, style = CYCLE[index % len(CYCLE)], STYLES[index % len(STYLES)]
        marker = "o" if points or len(curve.steps) < 4 else None
        # No trailing mean on a logarithmic axis: it would be dominated by the largest value.
        if len(curve.steps) >= AVERAGED_FROM and not log:
            axes.plot(curve.steps, curve.values, color=color, alpha=0.55, linewidth=0.7)
            axes.plot(*trailing((curve.steps, curve.values)), color=color, linestyle=style, label=curve.label)
        else:
            axes.plot(
                curve.steps, curve.values, color=color, linestyle=style, marker=marker, markersize=4, label=curve.label
            )
    # A logarithmic axis cannot show a curve that is zero throughout.
    if log and any((curve.values < 0).any() for curve in curves):
        log_scale_of_both_signs(axes)
    elif log and any((curve.values > 0).any() for curve in curves):
        log_scale_with_zero(axes)
    elif curves and all((curve.values >= 0).all() for curve in curves):
        highest = max(curve.values.max() for curve in curves)
        if min(curve.values.min() for curve in curves) < 0.3 * highest or highest == 0:
            highest = highest or top or 1.0
            # Slightly below 0, so that a curve at 0 is visible.
            axes.set_ylim(-0.03 * highest, 1.08 * highest)


def _draw_quantiles(axes: Axes, series: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    """Draw five series: the quantiles 1, 5, 50, 95 and 99 of a ratio, whose neutral value is 1."""
    (steps, _), values = series[0], [value for _, value in series]
    axes.fill_between(steps, values[0], values[4], color=SKY, alpha=0.35, linewidth=0, label="1 to 99%")
    axes.fill_between(steps, values[1], values[3], color=BLUE, alpha=0.4, linewidth=0, label="5 to 95%")
    marker = "o" if len(steps) < 4 else None
    axes.plot(steps, values[2], color=VERMILLION, marker=marker, markersize=4, label="median")
    axes.axhline(1.0, color=INK, linewidth=0.6, linestyle=":")
    low, high = min(value.min() for value in values), max(value.max() for value in values)
    if low > 0 and high / low > 10:
        log_scale(axes)


def _draw_layers(axes: Axes, curves: Sequence[Curve]) -> None:
    """Draw every layer; of more than six layers five and the range of all over the steps they share."""
    shown = list(curves)
    if len(curves) > len(CYCLE):
        steps = reduce(np.intersect1d, [curve.steps for curve in curves])
        values = np.stack([curve.values[np.isin(curve.steps, steps)] for curve in curves])
        axes.fill_between(steps, values.min(0), values.max(0), color=SKY, alpha=0.3, linewidth=0, label="all layers")
        shown = [curves[index] for index in np.linspace(0, len(curves) - 1, 5).round().astype(int)]
    named = [Curve(f"layer {c.label}" if c.label.isdecimal() else c.label, c.steps, c.values) for c in shown]
    _draw_curves(axes, named, log=False, points=False, top=None)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.4g}".replace("e-0", "e-")))


def _draw_bound(axes: Axes, key: str, run: Run) -> None:
    """Draw a horizontal line at the recipe's value of `key` and extend the axis to it."""
    section, _, name = key.partition(".")
    value = run.config.get(section, {}).get(name)
    if value is not None:
        axes.axhline(value, color=INK, linewidth=1.2, linestyle=":", label=f"{name} = {value:g}")
        low, high = axes.get_ylim()
        axes.set_ylim(min(low, 0.8 * value), max(high, 1.25 * value))


def _shade_healthy(axes: Axes, row: Metric) -> None:
    """Shade the healthy band behind the curves without changing the limits of the axis."""
    if row.low is None and row.high is None:
        return
    low, high = axes.get_ylim()
    bottom = low if row.low is None else max(row.low, low)
    top = high if row.high is None else min(row.high, high)
    if top > bottom:
        axes.axhspan(bottom, top, color=GREEN, alpha=0.1, linewidth=0, zorder=0)
    axes.set_ylim(low, high)
