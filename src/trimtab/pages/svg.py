"""The look of figures: colors, axes, and inline SVG that follows the theme of its page.

Colors are Okabe and Ito's (distinguishable for color-blind readers); line styles differ too, so that a gray print
stays readable.
"""

from __future__ import annotations

import io
import re
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from trimtab.pages.render import power

BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"
CYCLE = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY)
STYLES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1)), (0, (1, 1)))
# Stand-ins that no figure uses otherwise; the page's theme puts its own text and grid colors there.
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
    """A logarithmic axis with few labels, written as in the text around it (1e-3)."""
    axes.set_yscale("log", nonpositive="mask")
    low, high = axes.get_ylim()
    subdivided = (1.0, 2.0, 5.0) if high / low < 100 else (1.0,)
    axes.yaxis.set_major_locator(LogLocator(subs=subdivided, numticks=8))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short_power(value)))
    axes.yaxis.set_minor_locator(NullLocator())


def log_scale_with_zero(axes: Axes) -> None:
    """A logarithmic axis for curves of numbers that may be exactly 0, which lie on a line of their own below it."""
    values = np.concatenate([np.asarray(line.get_ydata(), dtype=np.float64) for line in axes.lines])
    positive = values[values > 0]
    if not len(positive) or not (values == 0).any():
        log_scale(axes)
        return
    low, high = np.floor(np.log10(positive.min())), np.ceil(np.log10(positive.max()))
    edge = 10.0 ** (low - 1)
    axes.set_yscale("symlog", linthresh=edge, linscale=0.3)
    axes.set_ylim(-0.4 * edge, 1.3 * positive.max())
    every = max(1, round((high - low) / 5))
    axes.set_yticks([0.0, *(10.0 ** np.arange(low, high + 1, every))])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: "0" if value == 0 else short_power(value)))
    axes.yaxis.set_minor_locator(NullLocator())


def log_scale_of_both_signs(axes: Axes) -> None:
    """A logarithmic axis up and down from 0, for estimates that may be negative: six powers of ten below the largest
    magnitude (or fewer, where the smallest is nearer) it becomes linear and passes through 0."""
    values = np.concatenate([np.asarray(line.get_ydata(), dtype=np.float64) for line in axes.lines])
    sizes = np.abs(values[values != 0])
    high = np.ceil(np.log10(sizes.max()))
    low = max(np.floor(np.log10(sizes.min())), high - 6)
    axes.set_yscale("symlog", linthresh=10.0**low, linscale=0.5)
    axes.set_ylim(*(1.3 * end if end else side * 10.0**low for end, side in ((values.min(), -1), (values.max(), 1))))
    every = max(1, round((high - low) / 3))
    # None at the edge of the linear part, whose label would lie on that of 0.
    powers = 10.0 ** np.arange(high, low, -every)[::-1]
    bottom, top = axes.get_ylim()
    axes.set_yticks([tick for tick in (*-powers[::-1], 0.0, *powers) if bottom <= tick <= top])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _signed_power(value)))
    axes.yaxis.set_minor_locator(NullLocator())


def _signed_power(value: float) -> str:
    if value == 0:
        return "0"
    return short_power(value) if value > 0 else f"\N{MINUS SIGN}{short_power(-value)}"


def short_power(value: float) -> str:
    """0.002 as 2e-3, numbers near 1 as they are."""
    if 0.01 <= value < 1000:
        return f"{value:g}"
    return power(value, 0)


def finish(figure: Figure, axes: Axes) -> None:
    """Whole steps below, and a legend above where more than one curve needs a name."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axes.set_xlabel("step")
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
        # Outside the axes, where it can hide no curve.
        figure.legend(handles, labels, loc="outside upper left", ncols=min(len(labels), 3), columnspacing=1.2)


def to_svg(figure: Figure, name: str) -> str:
    """The figure as an inline `<svg>` that scales with the page and follows its theme; `name` is read out aloud."""
    buffer = io.StringIO()
    # The salt keeps identifiers of different figures on one page apart, and equal input giving equal bytes.
    with mpl.rc_context({**RC, "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    svg = text[text.index("<svg") :].strip()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' (width|height)="[\d.]+pt"', "", svg, count=2)
    for color, name_in_page in THEME.items():
        svg = svg.replace(color.lower(), name_in_page)
    used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', svg))
    svg = re.sub(r' id="([^"]+)"', lambda match: match[0] if match[1] in used else "", svg)
    label = name.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
