"""The charts of one run over its steps. `metric_catalog` says which metrics are drawn, and under which titles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes

from trimtab.files import natural_key
from trimtab.pages.charts import CYCLE, GREEN, INK, SKY, WIDTH, digits, draw, quantile_bands
from trimtab.pages.page import Chart, Charts, Note, Section
from trimtab.report.step_curves import Curve, combine_seeds, draw_curves
from trimtab.runs.metric_catalog import Metric, metric, sections
from trimtab.runs.reader import Run, evenly_spaced
from trimtab.text import number

QUANTILES = ["q01", "q05", "q50", "q95", "q99"]
ACCURACY = "eval/<task>/greedy"
"""This metric is drawn as points between 0 and 1, together with the accuracy before training."""


@dataclass(frozen=True, eq=False)
class MetricCurve(Curve):
    """A logged metric as a curve of one series."""

    row: Metric  # of the metric catalog


def chart_sections(run: Run) -> list[Section]:
    """Returns charts of the logged metrics, by section of the metric catalog; "Progress and age" is last."""
    found = []
    for part in sections():
        titles = dict.fromkeys(row.chart for row in part.metrics if row.chart)
        curves = {title: _curves([row for row in part.metrics if row.chart == title], run) for title in titles}
        if shown := [_chart(title, here, run) for title, here in curves.items() if here]:
            found.append(Section(part.title, [Charts(shown)]))
    return sorted(found, key=lambda section: section.title == "Progress and age")


def _curves(rows: Sequence[Metric], run: Run) -> list[MetricCurve]:
    """Returns the curves of a chart that have values.

    A curve of rewards or rejections that equals the curve of another row is left out: a total with a single part.
    """
    curves: list[MetricCurve] = []
    for row in rows:
        for curve in _matches(row, run):
            if not any(
                np.array_equal(curve.seeds, other.seeds)
                for other in curves
                if other.row is not row and row.key.startswith(("reward/", "reject/"))
            ):
                curves.append(curve)
    return curves


def _matches(row: Metric, run: Run) -> Iterator[MetricCurve]:
    """Yields the curves of a row of the metric catalog, sorted by the keys that its pattern matches."""
    # A key with a separate row, such as reward/mean, does not belong to the row `reward/<name>`.
    found = [match for match in map(row.pattern.fullmatch, run.keys) if match and metric(match[0]) is row]
    for match in sorted(found, key=lambda match: natural_key(match[0])):
        series = run.series(match[0])
        if len(series[0]):
            yield MetricCurve(" ".join(filter(None, [row.curve, *match.groups()])), [series], row)


def _chart(title: str, curves: Sequence[MetricCurve], run: Run) -> Chart:
    """Returns a chart, with notes on the meaning and the healthy range of each of its metrics."""
    first, *others = {curve.row.key: curve.row for curve in curves}.values()
    if not others:
        notes = [Note(first.what), Note(first.healthy, "Healthy")]
    else:
        notes = [Note(f"{row.what} Healthy: {row.healthy}.", row.curve or row.key) for row in (first, *others)]
    now = f"last {number(curves[0].seeds[0][1][-1])}" if len(curves) == 1 else ""

    def paint(axes: Axes) -> None:
        _paint(axes, curves, run)
        _mark_returns(axes, run)

    legend = bool(run.returns)
    return Chart(title, draw(title, paint, size=(WIDTH, 2.5), legend=legend, steps=True), notes, now)


def _mark_returns(axes: Axes, run: Run) -> None:
    """Draws a line at the first step after each return to a checkpoint, and shades the discarded steps."""
    for first, last in run.discarded:
        axes.axvspan(first - 0.5, last + 0.5, color=INK, alpha=0.1, linewidth=0, zorder=0)
    starts = {one.start for one in run.returns}
    where = f"step {starts.pop()}" if len(starts) == 1 else "earlier steps"
    for index, one in enumerate(run.returns):
        label = "_" if index else f"returned to {where}"
        axes.axvline(one.step, color=INK, linewidth=0.8, linestyle=(0, (1, 1)), label=label)


def _paint(axes: Axes, curves: Sequence[MetricCurve], run: Run) -> None:
    row, series = curves[0].row, [curve.seeds[0] for curve in curves]
    if row.key == ACCURACY:
        tasks = [Curve(task, [(one.steps, one.values)]) for task, one in run.accuracy().items()]
        draw_curves(axes, tasks, points=True)
        axes.set_ylim(0, 1)
        return
    if [curve.label for curve in curves] == QUANTILES:
        quantile_bands(axes, series[0][0], [values for _, values in series])
    elif "<layer>" in row.key:
        draw_curves(axes, _layers(axes, curves), log=row.log, top=row.high)
        digits(axes.yaxis, 4)
    else:
        draw_curves(axes, curves, log=row.log, top=row.high)
    if row.bound:
        _draw_bound(axes, row.bound, run)
    if not row.of:  # Otherwise the healthy range is that of a ratio, and the curve shows only its numerator.
        _shade_healthy(axes, row)


def _layers(axes: Axes, curves: Sequence[Curve]) -> list[Curve]:
    """Returns a curve for each layer; of more than six layers, five curves, and draws the range over all layers."""
    shown = list(curves)
    if len(curves) > len(CYCLE) and (spread := combine_seeds([curve.seeds[0] for curve in curves])) is not None:
        axes.fill_between(spread.steps, spread.low, spread.high, color=SKY, alpha=0.3, linewidth=0, label="all layers")
        shown = evenly_spaced(curves, 5)
    return [Curve(f"layer {one.label}" if one.label.isdecimal() else one.label, one.seeds) for one in shown]


def _draw_bound(axes: Axes, key: str, run: Run) -> None:
    """Draws a horizontal line at the recipe's value of `key` and extends the axis to include it."""
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
