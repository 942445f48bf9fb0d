"""The page of a check: the answer, and the weight of the gradient against the ratio, of the loss and the objective."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
from matplotlib.axes import Axes

from trimtab.check_loss.check import NOT_JUDGED, Answer, Curve
from trimtab.pages.charts import BLUE, INK, VERMILLION, digits, draw, log_ticks
from trimtab.pages.page import Card, Cell, Chart, Charts, Note, Page, Section, Table, Verdict

HOW_TO_READ = (
    "How strongly a token pulls at the policy when its ratio is not 1, relative to a ratio of 1. At 0 it is clipped or "
    "dropped; where the line keeps rising nothing bounds it."
)


def page(answer: Answer, command: str) -> str:
    """Returns the page as HTML. command: the command line, for a reader who was not there."""
    rows = [[Cell(one.kind, note=one.text)] for one in answer.differences]
    facts = [("objective", answer.spec or answer.objective), ("called with", answer.inputs)]
    sections = [Section("", [Verdict("good" if answer.equal else "warn", [("verdict", answer.verdict)])])]
    if rows:
        sections.append(Section("Differences", [Table(("what differs, and what to change",), rows)]))
    charts = [_chart(answer, list(curves)) for _, curves in groupby(answer.curves, lambda curve: curve.name)]
    sections.append(Section("Weight of the gradient", [Note(HOW_TO_READ), Charts(charts)]))
    if answer.nearest:
        lines = "\n".join(["[objective]", *answer.nearest[0].lines])
        said = [Note(answer.others)] if answer.others else []
        sections.append(Section("In a recipe", [Card(code=lines), *said]))
    sections.append(Section("Again, and in continuous integration", [Card(code=command), Note(NOT_JUDGED)]))
    return Page("Trimtab check-loss", answer.function, sections, [fact for fact in facts if fact[1]]).html()


def _chart(answer: Answer, curves: Sequence[Curve]) -> Chart:
    name = curves[0].name
    title = f"Against {name}"
    return Chart(title, draw(title, lambda axes: _paint(axes, answer, curves)))


def _paint(axes: Axes, answer: Answer, curves: Sequence[Curve]) -> None:
    tops = []
    for curve in curves:
        color, sign = (BLUE, "A > 0") if curve.positive else (VERMILLION, "A < 0")
        theirs, mine = (np.array(values, dtype=np.float64) for values in (curve.theirs, curve.mine))
        axes.plot(curve.ratios, theirs, color=color, linewidth=5, alpha=0.3, label=f"{answer.objective}, {sign}")
        axes.plot(curve.ratios, mine, color=color, linestyle="--", label=f"this loss, {sign}")
        tops.append(np.nanmax(theirs))
        tops.append(min(np.nanmax(mine), 4 * np.nanmax(theirs)))  # an unbounded weight would flatten the rest
    axes.axvline(1.0, color=INK, linewidth=0.6, linestyle=":")
    axes.set_xscale("log")
    log_ticks(axes.xaxis)
    digits(axes.yaxis, 3)
    top = max(tops)
    axes.set(xlabel=f"ratio {curves[0].name}", ylabel="weight of the gradient", ylim=(-0.04 * top, 1.06 * top))
