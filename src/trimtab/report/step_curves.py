"""Draws curves over steps: of one run, or of groups of runs as means with bands over their seeds.

`draw_panels` draws the figures of a comparison, with one color for each group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial, reduce

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes

from trimtab.pages.charts import CYCLE, STYLES, THEME, Dashes, digits, draw, log_scale_of_any_sign, start_at_zero
from trimtab.pages.page import Chart, Note
from trimtab.report.groups import Group
from trimtab.runs.reader import Run
from trimtab.text import join_names

BAND_POINTS = 480
AVERAGED_FROM = 400  # points from which a trailing mean is drawn; shorter curves are readable as logged
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
        spread = combine_seeds(curve.seeds)
        if spread is None:
            continue
        (color, style), width = line_style(index), 1.5
        if len(spread.steps) >= AVERAGED_FROM:
            if averaged and not log:
                axes.plot(spread.steps, spread.mean, color=color, linewidth=0.7, alpha=0.55)
                spread = combine_seeds([smooth(series) for series in curve.seeds]) or spread
            else:
                width = 1.0
        if bands and len(curve.seeds) > 1:
            axes.fill_between(*thin_band(spread), color=color, alpha=0.15, linewidth=0)
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


def combine_seeds(seeds: Sequence[Series]) -> Spread | None:
    """Returns the mean and range over seeds at the steps that all seeds have, or None if there are no such steps.

    Later steps are left out: a mean over the remaining seeds would be biased towards runs that did not stop early.
    """
    steps = reduce(np.intersect1d, [steps for steps, _ in seeds]) if seeds else np.empty(0)
    if not len(steps):
        return None
    table = np.stack([values[np.isin(seed_steps, steps)] for seed_steps, values in seeds])
    return Spread(steps, table.mean(axis=0), table.min(axis=0), table.max(axis=0))


def thin_band(spread: Spread) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns steps, lowest and highest values with at most `BAND_POINTS` points, to bound the size of the SVG.

    A point has the lowest and the highest value of a group of neighboring steps.
    """
    size = -(-len(spread.steps) // BAND_POINTS)
    starts = np.arange(0, len(spread.steps), size)
    low, high = np.minimum.reduceat(spread.low, starts), np.maximum.reduceat(spread.high, starts)
    return spread.steps[starts], low, high


def smooth(series: Series) -> Series:
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


BANDS_UP_TO = 8  # groups; more would hide each other


@dataclass(frozen=True)
class Panel:
    """The specification of one figure."""

    title: str
    keys: tuple[str, ...] = ()  # the first logged key is drawn; held-out accuracy and clipped tokens have no key
    log: bool = False  # logarithmic axis
    averaged: bool = True  # long series get a trailing mean, except on a logarithmic axis

    def read(self, run: Run) -> Series:
        if self is ACCURACY:
            return run.held_out.steps, run.held_out.values
        logged = [run.series(key) for key in self.keys] or [run.clipped()]
        return next((series for series in logged if len(series[0])), logged[0])


ACCURACY = Panel("Held-out greedy accuracy", averaged=False)
PANELS = (
    ACCURACY,
    Panel("Training reward", ("reward/mean",)),
    Panel("Mismatch k3, nats per token", ("mismatch/k3",), log=True),
    Panel("Effective sample size, token weights", ("mismatch/ess_token",)),
    Panel("Ratio trainer / sampler, 99th percentile", ("mismatch/ratio_q99",)),
    Panel("Ratio trainer / sampler, 1st percentile", ("mismatch/ratio_q01",)),
    Panel("Gradient norm before clipping", ("optim/grad_norm",), log=True),
    Panel("Entropy, nats per token", ("entropy/mean", "entropy/rollout")),
    Panel("Response length, tokens", ("length/mean",)),
    Panel("Clipped tokens, share"),
    Panel("Rejected tokens, share", ("reject/tokens",)),
    Panel("Learning rate", ("optim/lr",), averaged=False),
)


def draw_panels(groups: Sequence[Group]) -> tuple[list[Chart], list[str], list[str]]:
    """Returns the figures, the titles of metrics that no run logged, and the titles of metrics that are always 0."""
    drawn, absent, zero = [], [], []
    for panel in PANELS:
        series = [[panel.read(run) for run in group.runs] for group in groups]
        pairs = zip(groups, series, strict=True)
        missing = [group.name for group, seeds in pairs if not any(len(steps) for steps, _ in seeds)]
        if len(missing) == len(groups):
            absent.append(panel.title.lower())
        elif panel is not ACCURACY and not any(values.any() for seeds in series for _, values in seeds):
            zero.append(panel.title.lower())
        else:
            notes = [Note(f"Not logged by {join_names(missing)}.")] if missing else []
            svg = draw(panel.title, partial(_draw_panel, panel=panel, series=series), steps=True)
            drawn.append(Chart(panel.title, svg, notes))
    return drawn, absent, zero


def draw_swatch(index: int) -> Markup:
    """Returns the line of one group for the legend, as an SVG element."""
    color, (_, dashes) = line_style(index)
    line = f'<line x1="0" x2="34" y1="5" y2="5" stroke="{THEME[color]}" stroke-width="3"'
    gaps = f' stroke-dasharray="{" ".join(f"{2 * part:g}" for part in dashes)}"' if dashes else ""
    return Markup(f'<svg class="swatch" viewBox="0 0 34 10" aria-hidden="true">{line}{gaps}/></svg>')


def draw_legend(names: Sequence[str]) -> Markup:
    """Returns the legend of the figures: the line style and the name of each group."""
    items = [Markup("<li>{}<bdi>{}</bdi></li>").format(draw_swatch(index), name) for index, name in enumerate(names)]
    return Markup('<ul class="legend small">{}</ul>').format(Markup("").join(items))


def _draw_panel(axes: Axes, panel: Panel, series: Sequence[Sequence[Series]]) -> None:
    crowded = len(series) > BANDS_UP_TO
    curves = [Curve("_", [seed for seed in seeds if len(seed[0])]) for seeds in series]
    averaged, points = panel.averaged and not crowded, panel is ACCURACY
    draw_curves(axes, curves, log=panel.log, points=points, averaged=averaged, bands=not crowded)
    if panel is ACCURACY:
        axes.set_ylim(-0.02, 1.02)
    elif not panel.log and 0 < axes.get_ylim()[1] < 0.01:
        digits(axes.yaxis, 2)
