"""Figures for HTML pages: colors, axes, shared drawings, and inline SVG that follows the theme of the page.

The colors are the palette of Okabe and Ito, which color-blind readers can distinguish. Line styles differ too, so that
figures can be printed in gray.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from trimtab.text import short_exponent

BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"
CYCLE = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY)
Dashes = tuple[int, tuple[float, ...] | None]
STYLES: tuple[Dashes, ...] = (
    (0, None),
    (0, (3.7, 1.6)),
    (0, (6.4, 1.6, 1, 1.6)),
    (0, (1, 1.65)),
    (0, (5, 1, 1, 1)),
    (0, (1, 1)),
)
"""Line styles of matplotlib: an offset, and the lengths of dashes and gaps in line widths; the first is solid."""
# Placeholder colors: `to_svg` replaces them with the text and grid colors of the theme.
INK, GRID = "#010203", "#c5c6c7"
THEME = {INK: "currentColor", GRID: "var(--grid)"}
THEME |= {
    color: f"var(--{name})"
    for color, name in zip(CYCLE, ("blue", "vermillion", "green", "purple", "orange", "sky"), strict=True)
}
RC: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 10,
    "font.family": "sans-serif",
    "axes.grid": True,
    "grid.linewidth": 0.5,
    "legend.fontsize": 9,
    "lines.linewidth": 1.5,
    **dict.fromkeys(("axes.labelcolor", "text.color", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("axes.edgecolor", "grid.color"), GRID),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "none"),
    **dict.fromkeys(("text.parse_math", "axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    **dict.fromkeys(("xtick.major.size", "ytick.major.size"), 0),
}
WIDTH, HEIGHT = 4.2, 2.7  # inches, for text of 10 points
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

    The figure has a legend if several curves have labels, or if one has and `legend` is set. With `steps`, the x-axis
    counts steps.
    """
    with mpl.rc_context(RC):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.add_subplot()
        paint(axes)
        if steps:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
            axes.set_xlabel("step")
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
            handles.append(Patch(facecolor=color, label=f"≤ {math.expm1(shade / _SHADES * math.log1p(most)):,.0f}"))
        axes.plot([0, 1], [0, 1], color=INK, linewidth=0.6, linestyle=":")
        axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal", xlabel="sampler probability", ylabel="trainer probability")
        axes.legend(
            handles=handles, title="tokens", title_fontsize=9, loc="upper left", bbox_to_anchor=(1.02, 1), fontsize=8.5
        )

    return draw("Trainer against sampler probability", paint, size=(WIDTH, 3.0))


def log_ticks(axis: Axis) -> None:
    """Label a logarithmic axis sparsely, as in the text of the page (1e-3)."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 100 else (1.0,), numticks=8))
    axis.set_major_formatter(FuncFormatter(lambda value, _: short_power(value)))
    axis.set_minor_locator(NullLocator())


def log_scale(axes: Axes) -> None:
    axes.set_yscale("log", nonpositive="mask")
    log_ticks(axes.yaxis)


def log_scale_of_any_sign(axes: Axes) -> None:
    """Set a logarithmic y-axis that can also show zeros and negative estimates.

    If there are any, the axis is linear around 0, up to the smallest magnitude. If values are negative, the linear part
    reaches at least to six powers of ten below the largest magnitude.
    """
    values = np.concatenate([np.asarray(line.get_ydata(), dtype=np.float64) for line in axes.lines])
    magnitudes = np.abs(values[values != 0])
    if not len(magnitudes) or (values > 0).all():
        log_scale(axes)
        return
    lowest, highest = float(values.min()), float(values.max())
    high, low = np.ceil(np.log10(magnitudes.max())), np.floor(np.log10(magnitudes.min()))
    if lowest < 0:
        low = max(low, high - 6)
    edge = 10.0**low
    axes.set_yscale("symlog", linthresh=edge, linscale=0.5)
    axes.set_ylim(1.3 * lowest if lowest < 0 else -0.4 * edge, 1.3 * highest if highest > 0 else edge)
    # No tick at the edge of the linear part: its label would overlap the label of 0.
    powers = 10.0 ** np.arange(high, low, -max(1, round((high - low) / (3 if lowest < 0 else 5))))
    bottom, top = axes.get_ylim()
    axes.set_yticks([tick for tick in (*-powers, 0.0, *powers[::-1]) if bottom <= tick <= top])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short_power(value)))
    axes.yaxis.set_minor_locator(NullLocator())


def start_at_zero(axes: Axes, top: float | None = None) -> None:
    """Start the y-axis slightly below 0 if curves come near 0 or are nearly constant; a curve at 0 is then visible.

    `top` is the end of the axis if all curves are 0 everywhere.
    """
    drawn = [values for line in axes.lines if len(values := np.asarray(line.get_ydata(), dtype=np.float64))]
    if not drawn or (smallest := min(values.min() for values in drawn)) < 0:
        return
    largest = max(values.max() for values in drawn)
    # An axis fitted to nearly constant curves would show only their rounding.
    if smallest < 0.3 * largest or largest - smallest <= 1e-6 * largest:
        highest = largest or top or 1.0
        axes.set_ylim(-0.03 * highest, 1.08 * highest)


def short_power(value: float) -> str:
    """Returns a number as text: 2e-3 for 0.002; 0 and magnitudes from 0.01 to 1000 have no exponent."""
    size = abs(value)
    text = f"{size:g}" if value == 0 or 0.01 <= size < 1000 else short_exponent(f"{size:.0e}")
    return f"\N{MINUS SIGN}{text}" if value < 0 else text


def digits(axis: Axis, count: int) -> None:
    """Label an axis with numbers of at most `count` significant digits."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: short_exponent(f"{value:.{count}g}")))


def to_svg(figure: Figure, name: str) -> Markup:
    """Returns the figure as an inline `<svg>` that scales with the page and follows its theme.

    `name` is the label for screen readers.
    """
    buffer = io.StringIO()
    # The salt makes identifiers unique on a page, and makes equal figures byte-identical.
    with mpl.rc_context({**RC, "svg.hashsalt": name}):
        # Not `savefig`, which draws every figure twice if a layout engine is set.
        FigureCanvasSVG(figure).print_svg(buffer, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = buffer.getvalue()
    svg = text[text.index("<svg") :].strip()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' (width|height)="[\d.]+pt"', "", svg, count=2)
    for color, variable in THEME.items():
        svg = svg.replace(color.lower(), variable)
    referenced = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', svg))
    svg = re.sub(r' id="([^"]+)"', lambda match: match[0] if match[1] in referenced else "", svg)
    # Not escaped: matplotlib escapes every text that it draws.
    return Markup(svg.replace("<svg", f'<svg role="img" aria-label="{escape(name)}"', 1))
