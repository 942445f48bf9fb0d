"""Figures as files, for papers and for documents that cannot include HTML."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from trimtab.pages.svg import BLUE, INK, RC, VERMILLION
from trimtab.report.comparison_table import ComparisonTable
from trimtab.runs.atomic import write_output

# Letters as outlines, since a paper's reader may lack the font; equal figures are equal files.
_SETTINGS: dict[Any, Any] = {
    **RC,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "svg.fonttype": "path",
    "svg.hashsalt": "trimtab",
}
_METADATA: dict[str, dict[str, Any]] = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}


def write_figures(paint: Callable[[], Figure], path: Path) -> list[Path]:
    """Writes what `paint` draws as `path` with the suffixes .png (160 dots per inch) and .svg, and returns both."""
    written = []
    with mpl.rc_context(_SETTINGS), warnings.catch_warnings():
        # A name may contain characters that the font lacks; they are drawn as boxes.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure = paint()
        for kind, metadata in _METADATA.items():
            buffer = io.BytesIO()
            figure.savefig(buffer, format=kind, dpi=160, metadata=metadata)
            written.append(write_output(path.with_suffix(f".{kind}"), buffer.getvalue()))
    return written


def accuracy_figure(table: ComparisonTable, methods: Sequence[str]) -> Figure:
    """Returns the accuracy of every method in every regime: a dot for each seed, a bar at their mean.

    The dotted line is the accuracy before training. A method that was not trained in a regime has no dots there.
    """
    size = (3.1 * len(table.regimes) + 2.0, 0.3 * len(methods) + 1.2)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(1, max(1, len(table.regimes)), sharey=True, squeeze=False)[0]
    for axes, regime in zip(panels, table.regimes, strict=False):
        here = {place: table.scores.get((method, regime)) for place, method in enumerate(methods)}
        scores = {place: score for place, score in here.items() if score is not None}
        before = [row["accuracy_before"] for score in scores.values() for row in score.rows]
        known = [value for value in before if value is not None]
        if known:
            axes.axvline(float(np.mean(known)), color=INK, linewidth=1, linestyle=":")
        for place, score in scores.items():
            values = list(score.values)
            axes.plot(values, [place] * len(values), "o", color=BLUE, alpha=0.35, markersize=4, markeredgewidth=0)
            axes.plot(score.accuracy.mean, place, "|", color=VERMILLION, markersize=13, markeredgewidth=2)
        axes.set_title(regime, fontsize=10, loc="left")
        axes.set_xlim(-0.02, 1.02)
        axes.set_xlabel("held-out accuracy")
        axes.grid(visible=False, axis="x")
    panels[0].set_yticks(range(len(methods)), list(methods))
    panels[0].set_ylim(len(methods) - 0.5, -0.5)
    return figure
