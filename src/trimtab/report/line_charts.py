"""Charts of one run over its steps, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes

from trimtab.pages.charts import WIDTH, draw, quantile_bands
from trimtab.pages.svg import (
    CYCLE,
    GREEN,
    INK,
    SKY,
    STYLES,
    digits,
    log_scale_of_any_sign,
    start_at_zero,
)
from trimtab.report.chart_specs import Chart, Lines
from trimtab.report.curves import AVERAGED_FROM, trailing
from trimtab.runs.metric_catalog import Metric
from trimtab.runs.reader import Run, evenly_spaced

Curve = tuple[str, np.ndarray, np.ndarray]
"""Label, steps and values of a series, both arrays (count,)."""


def draw_chart(chart: Chart, lines: Lines, run: Run) -> Markup:
    """Returns the chart of one run as an `<svg>` element; `lines` are labels and keys of the curves it has."""

    def paint(axes: Axes) -> None:
        curves: list[Curve] = [(label, *run.series(key)) for label, key in lines]
        if chart.kind == "accuracy":
            curves = [(task, accuracy.steps, accuracy.values) for task, accuracy in run.accuracy().items()]
        if chart.kind == "quantiles":
            quantile_bands(axes, curves[0][1], [values for *_, values in curves])
        elif chart.kind == "layers":
            _draw_layers(axes, curves)
        else:
            _draw_curves(axes, curves, log=chart.log, points=chart.kind == "accuracy", top=chart.caption.high)
        if chart.bound:
            _draw_bound(axes, chart.bound, run)
        if chart.kind == "accuracy":
            axes.set_ylim(0, 1)
        elif chart.shade:
            _shade_healthy(axes, chart.caption)

    return draw(chart.title, paint, size=(WIDTH, 2.5), steps=True)


def _draw_curves(axes: Axes, curves: Sequence[Curve], *, log: bool, points: bool, top: float | None) -> None:
    """Draws the curves; `top` is the end of the axis if all curves are 0 throughout."""
    for index, (label, steps, values) in enumerate(curves):
        color, style = CYCLE[index % len(CYCLE)], STYLES[index % len(STYLES)]
        marker = "o" if points or len(steps) < 4 else None
        # No trailing mean on a logarithmic axis: it would be dominated by the largest value.
        if len(steps) >= AVERAGED_FROM and not log:
            axes.plot(steps, values, color=color, alpha=0.55, linewidth=0.7)
            axes.plot(*trailing((steps, values)), color=color, linestyle=style, label=label)
        else:
            axes.plot(steps, values, color=color, linestyle=style, marker=marker, markersize=4, label=label)
    # A logarithmic axis cannot show a curve that is zero throughout.
    if log and any(values.any() for *_, values in curves):
        log_scale_of_any_sign(axes)
    else:
        start_at_zero(axes, top)


def _draw_layers(axes: Axes, curves: Sequence[Curve]) -> None:
    """Draws every layer; of more than six layers five and the range of all over the steps they share."""
    shown = list(curves)
    if len(curves) > len(CYCLE):
        common = reduce(np.intersect1d, [steps for _, steps, _ in curves])
        table = np.stack([values[np.isin(steps, common)] for _, steps, values in curves])
        axes.fill_between(common, table.min(0), table.max(0), color=SKY, alpha=0.3, linewidth=0, label="all layers")
        shown = evenly_spaced(curves, 5)
    named = [(f"layer {name}" if name.isdecimal() else name, steps, values) for name, steps, values in shown]
    _draw_curves(axes, named, log=False, points=False, top=None)
    digits(axes.yaxis, 4)


def _draw_bound(axes: Axes, key: str, run: Run) -> None:
    """Draws a horizontal line at the recipe's value of `key` and extends the axis to it."""
    section, _, name = key.partition(".")
    value = run.config.get(section, {}).get(name)
    if value is not None:
        axes.axhline(value, color=INK, linewidth=1.2, linestyle=":", label=f"{name} = {value:g}")
        low, high = axes.get_ylim()
        axes.set_ylim(min(low, 0.8 * value), max(high, 1.25 * value))


def _shade_healthy(axes: Axes, row: Metric) -> None:
    """Shades the healthy band behind the curves without changing the limits of the axis."""
    if row.low is None and row.high is None:
        return
    low, high = axes.get_ylim()
    bottom = low if row.low is None else max(row.low, low)
    top = high if row.high is None else min(row.high, high)
    if top > bottom:
        axes.axhspan(bottom, top, color=GREEN, alpha=0.1, linewidth=0, zorder=0)
    axes.set_ylim(low, high)
