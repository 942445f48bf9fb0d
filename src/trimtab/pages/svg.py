"""Colors, axes, and conversion of figures to inline SVG that follows the theme of its page.

The colors are the palette of Okabe and Ito, which is distinguishable for color-blind readers; line styles differ too,
for printing in gray.
"""

from __future__ import annotations

import io
import re
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from trimtab.pages.render import power

BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"
CYCLE = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY)
STYLES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1)), (0, (1, 1)))
# Placeholder colors that no figure uses otherwise; `to_svg` replaces them by the text and grid colors of the theme.
INK, GRID = "#010203", "#c5c6c7"
THEME = {
    INK: "currentColor",
    GRID: "var(--grid)",
    BLUE: "var(--blue)",
    VERMILLION: "var(--vermillion)",
    GREEN: "var(--green)",
    PURPLE: "var(--purple)",
    ORANGE: "var(--orange)",
    SKY: "var(--sky)",
}
RC: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 10,
    "font.family": "sans-serif",
    "axes.edgecolor": GRID,
    "axes.labelcolor": INK,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GRID,
    "grid.linewidth": 0.5,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.5,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}


def log_scale(axes: Axes) -> None:
    """Set a logarithmic axis with few labels, written as in the text of the page (1e-3)."""
    axes.set_yscale("log", nonpositive="mask")
    low, high = axes.get_ylim()
    subdivided = (1.0, 2.0, 5.0) if high / low < 100 else (1.0,)
    axes.yaxis.set_major_locator(LogLocator(subs=subdivided, numticks=8))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short_power(value)))
    axes.yaxis.set_minor_locator(NullLocator())


def log_scale_with_zero(axes: Axes) -> None:
    """Set a logarithmic axis with an additional position for exact zeros below it."""
    values = np.concatenate([np.asarray(line.get_ydata(), dtype=np.float64) for line in axes.lines])
    positive = values[values > 0]
    if not len(positive) or not (values == 0).any():
        log_scale(axes)
        return
    low, high = np.floor(np.log10(positive.min())), np.ceil(np.log10(positive.max()))
    zero_edge = 10.0 ** (low - 1)
    axes.set_yscale("symlog", linthresh=zero_edge, linscale=0.3)
    axes.set_ylim(-0.4 * zero_edge, 1.3 * positive.max())
    stride = max(1, round((high - low) / 5))
    axes.set_yticks([0.0, *(10.0 ** np.arange(low, high + 1, stride))])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: "0" if value == 0 else short_power(value)))
    axes.yaxis.set_minor_locator(NullLocator())


def log_scale_of_both_signs(axes: Axes) -> None:
    """Set a symmetric logarithmic axis, for estimates that may be negative.

    It contains 0 and is linear around it, from six powers of ten below the largest magnitude, or from the smallest one
    if that is larger.
    """
    values = np.concatenate([np.asarray(line.get_ydata(), dtype=np.float64) for line in axes.lines])
    magnitudes = np.abs(values[values != 0])
    high = np.ceil(np.log10(magnitudes.max()))
    low = max(np.floor(np.log10(magnitudes.min())), high - 6)
    axes.set_yscale("symlog", linthresh=10.0**low, linscale=0.5)
    ends = (min(values.min(), 0.0), -1), (max(values.max(), 0.0), 1)
    axes.set_ylim(*(1.3 * end if end else side * 10.0**low for end, side in ends))
    stride = max(1, round((high - low) / 3))
    # No tick at the edge of the linear part: its label would overlap that of 0.
    powers = 10.0 ** np.arange(high, low, -stride)[::-1]
    bottom, top = axes.get_ylim()
    axes.set_yticks([tick for tick in (*-powers[::-1], 0.0, *powers) if bottom <= tick <= top])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _signed_power(value)))
    axes.yaxis.set_minor_locator(NullLocator())


def _signed_power(value: float) -> str:
    if value == 0:
        return "0"
    return short_power(value) if value > 0 else f"\N{MINUS SIGN}{short_power(-value)}"


def short_power(value: float) -> str:
    """Returns 2e-3 for 0.002; numbers from 0.01 to 1000 without exponent."""
    if 0.01 <= value < 1000:
        return f"{value:g}"
    return power(value, 0)


def finish(figure: Figure, axes: Axes) -> None:
    """Set integer steps on the x-axis, and a legend if there is more than one labelled curve."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axes.set_xlabel("step")
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
        # Outside the axes, so that it covers no curve.
        figure.legend(handles, labels, loc="outside upper left", ncols=min(len(labels), 3), columnspacing=1.2)


def to_svg(figure: Figure, name: str) -> str:
    """Returns the figure as an inline `<svg>` that scales with the page and follows its theme.

    `name` is the label for screen readers.
    """
    buffer = io.StringIO()
    # The salt makes identifiers unique per figure on a page, and equal input give equal bytes.
    with mpl.rc_context({**RC, "svg.hashsalt": name}):
        # Not `savefig`, which draws every figure twice where a layout engine is set.
        FigureCanvasSVG(figure).print_svg(buffer, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = buffer.getvalue()
    svg = text[text.index("<svg") :].strip()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' (width|height)="[\d.]+pt"', "", svg, count=2)
    for color, variable in THEME.items():
        svg = svg.replace(color.lower(), variable)
    referenced = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', svg))
    svg = re.sub(r' id="([^"]+)"', lambda match: match[0] if match[1] in referenced else "", svg)
    label = name.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
