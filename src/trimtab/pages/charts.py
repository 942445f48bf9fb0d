"""Figures that several pages draw."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import matplotlib as mpl
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from trimtab.pages.svg import BLUE, INK, RC, SKY, VERMILLION, log_scale, step_axis, to_svg

WIDTH, HEIGHT = 4.2, 2.7  # inches, as text of 10 points is drawn
_SHADES = 5  # darkness levels of a scatter, logarithmic in the count
_SQUARE = np.array([(0, 0), (1, 0), (1, 1), (0, 1)])


def draw(
    name: str,
    paint: Callable[[Axes], None],
    *,
    size: tuple[float, float] = (WIDTH, HEIGHT),
    legend: bool = False,
    steps: bool = False,
) -> Markup:
    """Returns the figure that `paint` draws as an `<svg>` element.

    Curves with labels get a legend if there are several, or `legend` is set. `steps`: the x-axis counts steps.
    """
    with mpl.rc_context(RC):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.add_subplot()
        paint(axes)
        if steps:
            step_axis(axes)
        handles, labels = axes.get_legend_handles_labels()
        if len(labels) > (0 if legend else 1):
            # Outside the axes, so that it covers no curve.
            columns = min(len(labels), 3 if steps else 2)
            figure.legend(handles, labels, loc="outside upper left", ncols=columns, columnspacing=1.2)
        return to_svg(figure, name)


def quantile_bands(axes: Axes, steps: np.ndarray, quantiles: Sequence[np.ndarray]) -> None:
    """Draw the quantiles 1, 5, 50, 95 and 99 of a ratio, whose neutral value is 1; each array is (steps,)."""
    first, fifth, median, ninety_fifth, last = quantiles
    axes.fill_between(steps, first, last, color=SKY, alpha=0.35, linewidth=0, label="1 to 99%")
    axes.fill_between(steps, fifth, ninety_fifth, color=BLUE, alpha=0.4, linewidth=0, label="5 to 95%")
    marker = "o" if len(steps) < 4 else None
    axes.plot(steps, median, color=VERMILLION, marker=marker, markersize=4, label="median")
    axes.axhline(1.0, color=INK, linewidth=0.6, linestyle=":")
    if first.min() > 0 and last.max() / first.min() > 10:
        log_scale(axes)


def scatter_svg(counts: np.ndarray) -> Markup:
    """Draws counts (bins, bins) of trainer probability (rows) over sampler probability (columns), log-shaded."""
    bins, most = len(counts), max(int(counts.max()), 1)
    level = np.ceil(np.log1p(counts) / math.log1p(most) * _SHADES).astype(np.int64)

    def paint(axes: Axes) -> None:
        handles = []
        for shade in range(1, _SHADES + 1):
            color = to_rgba(BLUE, alpha=shade / _SHADES)
            rows, columns = np.nonzero(level == shade)
            squares = (np.stack([columns, rows], axis=-1)[:, None, :] + _SQUARE) / bins
            axes.add_collection(PolyCollection(list(squares), facecolors=color, linewidths=0))
            handles.append(Patch(facecolor=color, label=f"≤ {_count(math.expm1(shade / _SHADES * math.log1p(most)))}"))
        axes.plot([0, 1], [0, 1], color=INK, linewidth=0.6, linestyle=":")
        axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal", xlabel="sampler probability", ylabel="trainer probability")
        axes.legend(
            handles=handles, title="tokens", title_fontsize=9, loc="upper left", bbox_to_anchor=(1.02, 1), fontsize=8.5
        )

    return draw("Trainer against sampler probability", paint, size=(WIDTH, 3.0))


def _count(value: float) -> str:
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.2g}{unit}" if value < 100 * size else f"{value / size:.0f}{unit}"
    return f"{value:.0f}"
