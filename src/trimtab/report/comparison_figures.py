"""The figures of a comparison: one color per group, with a band over its seeds, on its page and as files."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from trimtab.pages.charts import (
    BLUE,
    CYCLE,
    INK,
    RC,
    STYLES,
    THEME,
    VERMILLION,
    digits,
    draw,
    log_scale_of_any_sign,
    start_at_zero,
    step_axis,
)
from trimtab.pages.page import Chart, Note
from trimtab.report.curves import AVERAGED_FROM, Series, band, thinned, trailing
from trimtab.report.groups import Group, join_names
from trimtab.report.summary_columns import accuracy_of
from trimtab.runs.atomic import write_output
from trimtab.runs.reader import Run

if TYPE_CHECKING:
    from trimtab.report.experiment_page import ComparisonTable

# Groups up to which bands are drawn (more would hide each other), and seeds up to which single curves are drawn.
BANDS_UP_TO, THIN_UP_TO = 8, 3
_DASHES = {0: "", 1: "7 3", 2: "8 3 2 3", 3: "2 3", 4: "8 2 2 2", 5: "2 2"}
# Letters as outlines, since a paper's reader may lack the font; equal figures are equal files.
_SETTINGS: dict[Any, Any] = {
    **RC,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "svg.fonttype": "path",
    "svg.hashsalt": "trimtab",
}
_METADATA: dict[str, dict[str, Any]] = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}


@dataclass(frozen=True)
class Panel:
    """The specification of one figure.

    `read` returns the series of a run. `unit` sets the axis to [0, 1]. `points` marks single measurements. `noisy`
    series get a trailing mean where they are long; logarithmic ones do not, since their mean is dominated by the
    largest value.
    """

    title: str
    read: Callable[[Run], Series]
    log: bool = False
    unit: bool = False
    points: bool = False
    noisy: bool = False


def _first_logged(*keys: str) -> Callable[[Run], Series]:
    """Returns a reader of the first of `keys` that the run logged."""

    def read(run: Run) -> Series:
        candidates = [run.series(key) for key in keys]
        return next((series for series in candidates if len(series[0])), candidates[0])

    return read


def _positive(key: str) -> Callable[[Run], Series]:
    """Returns a reader of the values above 0; a 0 of such a metric means that nothing was measured."""

    def read(run: Run) -> Series:
        steps, values = run.series(key)
        return steps[values > 0], values[values > 0]

    return read


def _where_compared(key: str) -> Callable[[Run], Series]:
    """Returns a reader of a mismatch metric at the steps where tokens were compared.

    There a 0 is a measurement (`numerics = "invariant"`); elsewhere it means that nothing was measured.
    """

    def read(run: Run) -> Series:
        steps, values = run.series(key)
        steps_compared, tokens = run.series("mismatch/tokens")
        valid = (values > 0) | np.isin(steps, steps_compared[tokens > 0])
        return steps[valid], values[valid]

    return read


def _accuracy(run: Run) -> Series:
    accuracy = accuracy_of(run)
    return (accuracy.steps, accuracy.values) if accuracy else (np.empty(0), np.empty(0))


PANELS = (
    Panel("Held-out greedy accuracy", _accuracy, unit=True, points=True),
    Panel("Training reward", _first_logged("reward/mean"), noisy=True),
    Panel("Mismatch k3, nats per token", _where_compared("mismatch/k3"), log=True),
    Panel("Effective sample size, token weights", _first_logged("mismatch/ess_token"), noisy=True),
    Panel("Ratio trainer / sampler, 99th percentile", _first_logged("mismatch/ratio_q99"), noisy=True),
    Panel("Ratio trainer / sampler, 1st percentile", _first_logged("mismatch/ratio_q01"), noisy=True),
    Panel("Gradient norm before clipping", _positive("optim/grad_norm"), log=True),
    Panel("Entropy, nats per token", _first_logged("entropy/mean", "entropy/rollout"), noisy=True),
    Panel("Response length, tokens", _first_logged("length/mean"), noisy=True),
    Panel("Clipped tokens, share", Run.clipped, noisy=True),
    Panel("Rejected tokens, share", _first_logged("reject/tokens"), noisy=True),
    Panel("Learning rate", _first_logged("optim/lr")),
)
PICTURE_PANELS = (PANELS[1], PANELS[0], PANELS[2])


def draw_panels(groups: Sequence[Group]) -> tuple[list[Chart], list[str], list[str]]:
    """Returns the figures that some run has data for, and the titles of the others.

    The first titles are of what no run logged, the second of what is 0 at every step of all runs.
    """
    drawn, absent, zero = [], [], []
    for panel in PANELS:
        series = [[panel.read(run) for run in group.runs] for group in groups]
        missing = [
            group.name for group, seeds in zip(groups, series, strict=True) if not any(len(steps) for steps, _ in seeds)
        ]
        if len(missing) == len(groups):
            absent.append(panel.title.lower())
        elif not panel.unit and not any(values.any() for seeds in series for _, values in seeds):
            zero.append(panel.title.lower())
        else:
            notes = [Note(f"Not logged by {join_names(missing)}.")] if missing else []
            drawn.append(Chart(panel.title, _panel_svg(panel.title, panel, series), notes))
    return drawn, absent, zero


def accuracy_chart(title: str, curves: Sequence[Sequence[Series]], before: float | None) -> Chart:
    """Returns held-out accuracy over steps, seed by seed for each method. `before` is drawn as a level line."""
    return Chart(title, _panel_svg(title, PANELS[0], curves, level=before))


def _panel_svg(name: str, panel: Panel, series: Sequence[Sequence[Series]], *, level: float | None = None) -> Markup:
    def paint(axes: Axes) -> None:
        _draw_panel(axes, panel, series)
        if level is not None:
            axes.axhline(level, color=INK, linewidth=0.5, alpha=0.5)

    return draw(name, paint, steps=True)


def swatch(index: int) -> Markup:
    """Returns the line of one group for the legend, as an SVG element."""
    color, style = CYCLE[index % len(CYCLE)], _style_number(index)
    dashes = f' stroke-dasharray="{_DASHES[style]}"' if _DASHES[style] else ""
    line = f'<line x1="0" x2="34" y1="5" y2="5" stroke="{THEME[color]}" stroke-width="3"{dashes}/>'
    return Markup(f'<svg class="swatch" viewBox="0 0 34 10" aria-hidden="true">{line}</svg>')


def legend_of(groups: Sequence[tuple[str, str]]) -> Markup:
    """Returns the legend of figures: the line of each group, its name and what to know about it."""
    item = Markup('<li>{}<bdi>{}</bdi> <span class="soft">{}</span></li>')
    items = [item.format(swatch(index), name, about) for index, (name, about) in enumerate(groups)]
    return Markup('<ul class="legend small">{}</ul>').format(Markup("").join(items))


def picture(groups: Sequence[Group]) -> Figure:
    """Returns reward, held-out accuracy and k3 as one figure."""
    figure = Figure(figsize=(11, 3.5 + 0.22 * ((len(groups) - 1) // 4)), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(PICTURE_PANELS)), PICTURE_PANELS, strict=True):
        _draw_panel(axes, panel, [[panel.read(run) for run in group.runs] for group in groups])
        axes.set_title(panel.title, fontsize=10, loc="left")
        step_axis(axes)
    handles = [
        Line2D([], [], color=color, linestyle=style, linewidth=2)
        for color, style in (_line_style(index) for index in range(len(groups)))
    ]
    # matplotlib leaves labels that start with an underscore out of the legend.
    labels = [f"\N{ZERO WIDTH SPACE}{group.name}" for group in groups]
    figure.legend(handles, labels, loc="outside upper left", ncols=min(len(labels), 4), fontsize=9)
    return figure


def _draw_panel(axes: Axes, panel: Panel, series: Sequence[Sequence[Series]]) -> None:
    crowded = len(series) > BANDS_UP_TO
    averaged = panel.noisy and not crowded
    for index, seeds in enumerate(series):
        present = [item for item in seeds if len(item[0])]
        _draw_group(axes, present, _line_style(index), points=panel.points, crowded=crowded, averaged=averaged)
    if panel.unit:
        axes.set_ylim(-0.02, 1.02)
    elif panel.log and axes.lines:
        log_scale_of_any_sign(axes)
    else:
        if 0 < axes.get_ylim()[1] < 0.01:
            digits(axes.yaxis, 2)
        start_at_zero(axes)


def _draw_group(
    axes: Axes, series: Sequence[Series], line_style: tuple[str, Any], *, points: bool, crowded: bool, averaged: bool
) -> None:
    """Draws the mean over the steps all seeds have, its band, and thin lines of the values as logged.

    The thin lines are up to three single seeds; for other numbers of seeds their mean, if the thick line is a trailing
    mean.
    """
    color, style = line_style
    raw = band(series)
    if raw is None:
        return
    averaged = averaged and len(raw.steps) >= AVERAGED_FROM
    seeds_shown = not crowded and 1 < len(series) <= THIN_UP_TO
    for steps, values in series if seeds_shown else [(raw.steps, raw.mean)] if averaged else []:
        axes.plot(steps, values, color=color, linewidth=0.7, alpha=0.55)
    smooth = (band([trailing(item) for item in series]) if averaged else raw) or raw
    if not crowded and len(series) > 1:
        fill = thinned(smooth)
        axes.fill_between(fill.steps, fill.low, fill.high, color=color, alpha=0.15, linewidth=0)
    dense = len(smooth.steps) >= AVERAGED_FROM and not averaged
    width = 1.2 if crowded or dense else 2.0
    marker = "o" if points or len(smooth.steps) < 4 else None
    axes.plot(smooth.steps, smooth.mean, color=color, linestyle=style, linewidth=width, marker=marker, markersize=3.5)


def _line_style(index: int) -> tuple[str, Any]:
    return CYCLE[index % len(CYCLE)], STYLES[_style_number(index)]


def _style_number(index: int) -> int:
    """Returns the index of the line style; colors repeat after six groups, so 36 groups are distinguishable."""
    return (index + index // len(CYCLE)) % len(STYLES)


def write_figures(paint: Callable[[], Figure], path: Path) -> list[Path]:
    """Writes what `paint` draws as `path` with the suffixes .png (160 dots per inch) and .svg, and returns both."""
    written = []
    with mpl.rc_context(_SETTINGS), warnings.catch_warnings():
        # A name may contain characters that the font lacks; they are drawn as boxes.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure = paint()
        for kind, metadata in _METADATA.items():
            buffer = io.BytesIO()
            figure.savefig(buffer, format=kind, dpi=160, metadata=metadata)
            written.append(write_output(path.with_suffix(f".{kind}"), buffer.getvalue()))
    return written


def accuracy_figure(table: ComparisonTable, methods: Sequence[str]) -> Figure:
    """Returns the accuracy of every method in every regime: a dot for each seed, a bar at their mean.

    The dotted line is the accuracy before training. A method that was not trained in a regime has no dots there.
    """
    size = (3.1 * len(table.regimes) + 2.0, 0.3 * len(methods) + 1.2)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(1, max(1, len(table.regimes)), sharey=True, squeeze=False)[0]
    for axes, regime in zip(panels, table.regimes, strict=False):
        here = {place: table.scores.get((method, regime)) for place, method in enumerate(methods)}
        scores = {place: score for place, score in here.items() if score is not None}
        before = [row["accuracy_before"] for score in scores.values() for row in score.rows]
        known = [value for value in before if value is not None]
        if known:
            axes.axvline(float(np.mean(known)), color=INK, linewidth=1, linestyle=":")
        for place, score in scores.items():
            values = list(score.values)
            axes.plot(values, [place] * len(values), "o", color=BLUE, alpha=0.35, markersize=4, markeredgewidth=0)
            axes.plot(score.accuracy.mean, place, "|", color=VERMILLION, markersize=13, markeredgewidth=2)
        axes.set_title(regime, fontsize=10, loc="left")
        axes.set_xlim(-0.02, 1.02)
        axes.set_xlabel("held-out accuracy")
        axes.grid(visible=False, axis="x")
    panels[0].set_yticks(range(len(methods)), list(methods))
    panels[0].set_ylim(len(methods) - 0.5, -0.5)
    return figure
