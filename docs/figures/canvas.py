"""What the figures of the documents share: colors, axes, Markdown tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito: distinguishable for color-blind readers.
BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"
INK, PALE = "#333333", "#8c8c8c"
IMAGES = Path(__file__).parents[1] / "images"
RC: dict[Any, Any] = {
    "font.size": 10,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": PALE,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "lines.linewidth": 1.8,
    "legend.frameon": False,
}


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table; floats with three significant digits."""
    lines = [head, ["---"] * len(head), *([_cell(value) for value in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(value: float) -> str:
    """Three significant digits, powers of ten only where zeros would pile up; rounding errors of 0 are 0."""
    if abs(value) < 1e-12:
        return "0"
    if 1e-3 <= abs(value) < 1e4:
        text = f"{value:#.3g}" if abs(value) < 1000 else f"{value:.0f}"
        return text.rstrip(".")
    mantissa, _, power = f"{value:.2e}".partition("e")
    return f"{mantissa}e{int(power)}"


def label(axes: Axes, x: float, y: float, text: str, color: str, **options: Any) -> None:
    """Words next to what they name, in its color."""
    axes.text(x, y, text, color=color, fontsize=9, **options)


def save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160, metadata={"Software": None})


def _cell(value: Any) -> str:
    return number(value) if isinstance(value, float) else str(value)
