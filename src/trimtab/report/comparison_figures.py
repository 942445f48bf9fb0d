"""The figures of a comparison: a color per group, a band over its seeds."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from trimtab.pages.svg import CYCLE, RC, STYLES, THEME, finish, log_scale_with_zero, to_svg
from trimtab.report.curves import AVERAGED_FROM, Series, band, thinned, trailing
from trimtab.report.groups import Group
from trimtab.report.summary_columns import accuracy_of, clipped
from trimtab.runs.reader import Run

# Beyond so many groups bands hide each other and only the means are drawn.
BANDS_UP_TO, THIN_UP_TO = 8, 3
_DASHES = {0: "", 1: "7 3", 2: "8 3 2 3", 3: "2 3", 4: "8 2 2 2", 5: "2 2"}


@dataclass(frozen=True)
class Panel:
    """One figure: what to read of a run, and its axis. `unit` bounds it to [0, 1]; `points` are single measurements.

    `noisy` ones get a trailing average where they are long (not logarithmic ones: a mean is that of the largest alone).
    """

    title: str
    read: Callable[[Run], Series]
    log: bool = False
    unit: bool = False
    points: bool = False
    noisy: bool = False


@dataclass(frozen=True)
class Figures:
    """Drawn panels: title, figure, groups that lack it. Not drawn: what was not logged and what is 0 throughout."""

    drawn: list[tuple[str, Markup, list[str]]]
    absent: list[str]
    zero: list[str]


def _key(*keys: str) -> Callable[[Run], Series]:
    """The first of `keys` the run logged."""

    def read(run: Run) -> Series:
        found = [run.series(key) for key in keys]
        return next((series for series in found if len(series[0])), found[0])

    return read


def _positive(key: str) -> Callable[[Run], Series]:
    """A logarithmic axis has no place for 0, which such a metric reaches only when nothing was measured."""

    def read(run: Run) -> Series:
        steps, values = run.series(key)
        return steps[values > 0], values[values > 0]

    return read


def _measured(key: str) -> Callable[[Run], Series]:
    """Of a mismatch: 0 is a finding where tokens were compared (`numerics = "invariant"`), and nothing elsewhere."""

    def read(run: Run) -> Series:
        steps, values = run.series(key)
        compared, tokens = run.series("mismatch/tokens")
        there = (values > 0) | np.isin(steps, compared[tokens > 0])
        return steps[there], values[there]

    return read


def _accuracy(run: Run) -> Series:
    found = accuracy_of(run)
    return (found.steps, found.values) if found else (np.empty(0), np.empty(0))


PANELS = (
    Panel("Held-out greedy accuracy", _accuracy, unit=True, points=True),
    Panel("Training reward", _key("reward/mean"), noisy=True),
    Panel("Mismatch k3, nats per token", _measured("mismatch/k3"), log=True),
    Panel("Effective sample size, token weights", _key("mismatch/ess_token"), noisy=True),
    Panel("Ratio trainer / sampler, 99th percentile", _key("mismatch/ratio_q99"), noisy=True),
    Panel("Ratio trainer / sampler, 1st percentile", _key("mismatch/ratio_q01"), noisy=True),
    Panel("Gradient norm before clipping", _positive("optim/grad_norm"), log=True),
    Panel("Entropy, nats per token", _key("entropy/mean", "entropy/rollout"), noisy=True),
    Panel("Response length, tokens", _key("length/mean"), noisy=True),
    Panel("Clipped tokens, share", clipped, noisy=True),
    Panel("Rejected tokens, share", _key("reject/tokens"), noisy=True),
    Panel("Learning rate", _key("optim/lr")),
)
PICTURE_PANELS = (PANELS[1], PANELS[0], PANELS[2])


def draw_panels(groups: Sequence[Group]) -> Figures:
    """Every panel some run has data for, one figure each, so that a phone can stack them."""
    drawn, absent, zero = [], [], []
    for panel in PANELS:
        series = [[panel.read(run) for run in group.runs] for group in groups]
        having = [any(len(steps) for steps, _ in seeds) for seeds in series]
        if not any(having):
            absent.append(panel.title.lower())
            continue
        if not panel.unit and not any(values.any() for seeds in series for _, values in seeds):
            zero.append(panel.title.lower())
            continue
        with mpl.rc_context(RC):
            figure = Figure(figsize=(4.2, 2.7), layout="constrained")
            axes = figure.add_subplot()
            _panel(axes, panel, series)
            finish(figure, axes)
            # Not escaped: matplotlib made it, and it holds no name.
            svg = Markup(to_svg(figure, panel.title))
        missing = [group.name for group, found in zip(groups, having, strict=True) if not found]
        drawn.append((panel.title, svg, missing))
    return Figures(drawn, absent, zero)


def swatch(index: int) -> Markup:
    """The line of one group as it looks in every panel, for the legend."""
    color, style = CYCLE[index % len(CYCLE)], _style_number(index)
    dashes = f' stroke-dasharray="{_DASHES[style]}"' if _DASHES[style] else ""
    line = f'<line x1="0" x2="34" y1="5" y2="5" stroke="{THEME[color]}" stroke-width="3"{dashes}/>'
    return Markup(f'<svg class="swatch" viewBox="0 0 34 10" aria-hidden="true">{line}</svg>')


def picture(groups: Sequence[Group]) -> bytes:
    """Reward, held-out accuracy and k3 as one PNG on white."""
    buffer = io.BytesIO()
    with mpl.rc_context({**RC, "figure.facecolor": "white", "savefig.facecolor": "white"}), warnings.catch_warnings():
        # A folder's name may hold characters the font has no picture of; a box in their place is enough.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure = Figure(figsize=(11, 3.5 + 0.22 * ((len(groups) - 1) // 4)), layout="constrained")
        for axes, panel in zip(figure.subplots(1, len(PICTURE_PANELS)), PICTURE_PANELS, strict=True):
            _panel(axes, panel, [[panel.read(run) for run in group.runs] for group in groups])
            axes.set_title(panel.title, fontsize=10, loc="left")
            axes.set_xlabel("step")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        handles = [
            Line2D([], [], color=color, linestyle=style, linewidth=2)
            for color, style in (_look(index) for index in range(len(groups)))
        ]
        # A legend leaves out what begins with an underscore.
        labels = [f"\N{ZERO WIDTH SPACE}{group.name}" for group in groups]
        figure.legend(handles, labels, loc="outside upper left", ncols=min(len(labels), 4), fontsize=9)
        figure.savefig(buffer, format="png", dpi=160, metadata={"Software": None})
    return buffer.getvalue()


def _panel(axes: Axes, panel: Panel, series: Sequence[Sequence[Series]]) -> None:
    crowded = len(series) > BANDS_UP_TO
    averaged = panel.noisy and not crowded
    for index, seeds in enumerate(series):
        found = [item for item in seeds if len(item[0])]
        _seeds(axes, found, _look(index), points=panel.points, crowded=crowded, averaged=averaged)
    if panel.unit:
        axes.set_ylim(-0.02, 1.02)
    elif panel.log and axes.lines:
        log_scale_with_zero(axes)
    else:
        _from_zero(axes)


def _seeds(
    axes: Axes, series: Sequence[Series], look: tuple[str, Any], *, points: bool, crowded: bool, averaged: bool
) -> None:
    """The mean over the steps all seeds have and its band; thin beside it what was logged: up to three seeds on their
    own, of others their mean where the thick line is a trailing average."""
    color, style = look
    raw = band(series)
    if raw is None:
        return
    averaged = averaged and len(raw.steps) >= AVERAGED_FROM
    alone = not crowded and 1 < len(series) <= THIN_UP_TO
    for steps, values in series if alone else [(raw.steps, raw.mean)] if averaged else []:
        axes.plot(steps, values, color=color, linewidth=0.7, alpha=0.55)
    found = (band([trailing(item) for item in series]) if averaged else raw) or raw
    if not crowded and len(series) > 1:
        area = thinned(found)
        axes.fill_between(area.steps, area.low, area.high, color=color, alpha=0.15, linewidth=0)
    dense = len(found.steps) >= AVERAGED_FROM and not averaged
    width = 1.2 if crowded or dense else 2.0
    marker = "o" if points or len(found.steps) < 4 else None
    axes.plot(found.steps, found.mean, color=color, linestyle=style, linewidth=width, marker=marker, markersize=3.5)


def _from_zero(axes: Axes) -> None:
    """Curves that come near 0 are seen from 0 on, a little above the edge; so are constant ones."""
    _, high = axes.get_ylim()
    if 0 < high < 0.01:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.2g}".replace("e-0", "e-")))
    values = [np.asarray(line.get_ydata(), dtype=np.float64) for line in axes.lines]
    least = min((value.min() for value in values if len(value)), default=0.0)
    most = max((value.max() for value in values if len(value)), default=0.0)
    # An axis that fits nearly constant curves would show their rounding.
    if least >= 0 and (least < 0.3 * most or most - least <= 1e-3 * most):
        top = high if most > 0 else 1.0
        axes.set_ylim(-0.03 * top, top)


def _look(index: int) -> tuple[str, Any]:
    return CYCLE[index % len(CYCLE)], STYLES[_style_number(index)]


def _style_number(index: int) -> int:
    """Colors repeat after six groups; with another style each time, 36 groups look different."""
    return (index + index // len(CYCLE)) % len(STYLES)
