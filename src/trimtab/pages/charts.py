"""Figures that several pages draw."""

from __future__ import annotations

import math
from collections.abc import Callable

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from trimtab.pages.svg import BLUE, INK, RC, short_power, to_svg

WIDTH, HEIGHT = 4.2, 2.7  # inches, as text of 10 points is drawn
_SHADES = 5  # darkness levels of a scatter, logarithmic in the count
_SQUARE = np.array([(0, 0), (1, 0), (1, 1), (0, 1)])


def draw(name: str, paint: Callable[[Axes], None], *, legend: bool = False, height: float = HEIGHT) -> str:
    """Returns the figure that `paint` draws as an `<svg>` element; `legend` adds one if curves have labels."""
    with mpl.rc_context(RC):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        axes = figure.add_subplot()
        paint(axes)
        if legend and axes.get_legend_handles_labels()[1]:
            figure.legend(loc="outside upper left", ncols=2, columnspacing=1.2)
        return to_svg(figure, name)


def log_labels(axes: Axes) -> None:
    """Label a logarithmic x-axis sparsely, as in the text of the page (1e-3)."""
    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 100 else (1.0,), numticks=8))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_power(value)))
    axes.xaxis.set_minor_locator(NullLocator())


def scatter_svg(counts: np.ndarray) -> str:
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

    return draw("Trainer against sampler probability", paint, height=3.0)


def _count(value: float) -> str:
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.2g}{unit}" if value < 100 * size else f"{value / size:.0f}{unit}"
    return f"{value:.0f}"
