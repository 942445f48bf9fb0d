"""The figures of a comparison: one color per group, with a band over its seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from markupsafe import Markup
from matplotlib.axes import Axes

from trimtab.pages.charts import THEME, digits, draw
from trimtab.pages.page import Chart, Note
from trimtab.report.curves import Curve, Series, draw_curves, line_style
from trimtab.report.groups import Group
from trimtab.runs.reader import Run
from trimtab.text import join_names

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


def swatch(index: int) -> Markup:
    """Returns the line of one group for the legend, as an SVG element."""
    color, (_, dashes) = line_style(index)
    line = f'<line x1="0" x2="34" y1="5" y2="5" stroke="{THEME[color]}" stroke-width="3"'
    gaps = f' stroke-dasharray="{" ".join(f"{2 * part:g}" for part in dashes)}"' if dashes else ""
    return Markup(f'<svg class="swatch" viewBox="0 0 34 10" aria-hidden="true">{line}{gaps}/></svg>')


def legend_of(names: Sequence[str]) -> Markup:
    """Returns the legend of the figures: the line style and the name of each group."""
    items = [Markup("<li>{}<bdi>{}</bdi></li>").format(swatch(index), name) for index, name in enumerate(names)]
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
