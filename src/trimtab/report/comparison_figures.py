"""The figures of a comparison: one color per group, with a band over its seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes

from trimtab.pages.charts import (
    AVERAGED_FROM,
    CYCLE,
    STYLES,
    THEME,
    Series,
    digits,
    draw,
    log_scale_of_any_sign,
    start_at_zero,
    trailing,
)
from trimtab.pages.page import Chart, Note
from trimtab.report.groups import Group
from trimtab.runs.reader import Run
from trimtab.text import join_names

BANDS_UP_TO = 8  # groups; more would hide each other
_DASHES = {0: "", 1: "7 3", 2: "8 3 2 3", 3: "2 3", 4: "8 2 2 2", 5: "2 2"}
_BAND_POINTS = 480


@dataclass(frozen=True)
class Panel:
    """The specification of one figure."""

    title: str
    keys: tuple[str, ...] = ()  # the first logged key is drawn; held-out accuracy and clipped tokens have no key
    log: bool = False  # logarithmic axis, without a trailing mean: the largest value would dominate it
    averaged: bool = True  # long series get a trailing mean

    def read(self, run: Run) -> Series:
        if self is ACCURACY:
            return run.held_out.steps, run.held_out.values
        logged = [run.series(key) for key in self.keys] or [run.clipped()]
        steps, values = next((series for series in logged if len(series[0])), logged[0])
        if not self.log:
            return steps, values
        # A 0 means "not measured", unless tokens were compared at that step (`numerics = "invariant"`).
        compared, tokens = run.series("mismatch/tokens")
        measured = values > 0
        if self.keys[0].startswith("mismatch/"):
            measured |= np.isin(steps, compared[tokens > 0])
        return steps[measured], values[measured]


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


@dataclass(frozen=True, eq=False)
class Spread:
    """Mean and range over `steps`; each array is (steps,) float64."""

    steps: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def band(series: Sequence[Series]) -> Spread | None:
    """Returns the mean and range over seeds at the steps that all seeds have, or None if there are no such steps.

    Later steps are left out: a mean over the remaining seeds would be biased towards runs that did not stop early.
    """
    if not series:
        return None
    steps = reduce(np.intersect1d, [steps for steps, _ in series])
    if not len(steps):
        return None
    table = np.stack([values[np.isin(seed_steps, steps)] for seed_steps, values in series])
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


def swatch(index: int) -> Markup:
    """Returns the line of one group for the legend, as an SVG element."""
    color, style = CYCLE[index % len(CYCLE)], _style_number(index)
    dashes = f' stroke-dasharray="{_DASHES[style]}"' if _DASHES[style] else ""
    line = f'<line x1="0" x2="34" y1="5" y2="5" stroke="{THEME[color]}" stroke-width="3"{dashes}/>'
    return Markup(f'<svg class="swatch" viewBox="0 0 34 10" aria-hidden="true">{line}</svg>')


def legend_of(names: Sequence[str]) -> Markup:
    """Returns the legend of the figures: the line style and the name of each group."""
    items = [Markup("<li>{}<bdi>{}</bdi></li>").format(swatch(index), name) for index, name in enumerate(names)]
    return Markup('<ul class="legend small">{}</ul>').format(Markup("").join(items))


def _draw_panel(axes: Axes, panel: Panel, series: Sequence[Sequence[Series]]) -> None:
    crowded = len(series) > BANDS_UP_TO
    averaged = panel.averaged and not panel.log and not crowded
    for index, seeds in enumerate(series):
        present = [item for item in seeds if len(item[0])]
        _draw_group(axes, present, _line_style(index), points=panel is ACCURACY, crowded=crowded, averaged=averaged)
    if panel is ACCURACY:
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
    """Draws the mean over seeds and its band; below a trailing mean, the logged values as a thin line."""
    color, style = line_style
    raw = band(series)
    if raw is None:
        return
    smooth = raw
    if averaged and len(raw.steps) >= AVERAGED_FROM:
        axes.plot(raw.steps, raw.mean, color=color, linewidth=0.7, alpha=0.55)
        smooth = band([trailing(item) for item in series]) or raw
    if not crowded and len(series) > 1:
        fill = thinned(smooth)
        axes.fill_between(fill.steps, fill.low, fill.high, color=color, alpha=0.15, linewidth=0)
    width = 1.2 if crowded or (smooth is raw and len(raw.steps) >= AVERAGED_FROM) else 2.0
    marker = "o" if points or len(smooth.steps) < 4 else None
    axes.plot(smooth.steps, smooth.mean, color=color, linestyle=style, linewidth=width, marker=marker, markersize=3.5)


def _line_style(index: int) -> tuple[str, Any]:
    return CYCLE[index % len(CYCLE)], STYLES[_style_number(index)]


def _style_number(index: int) -> int:
    """Returns the index of the line style, which changes when the six colors repeat: 36 groups are distinguishable."""
    return (index + index // len(CYCLE)) % len(STYLES)
