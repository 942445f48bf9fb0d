"""Draws the page of a check: the answer, and the weights of the loss and of the objective against the ratio."""

from __future__ import annotations

import math
from functools import partial

import torch
from matplotlib.axes import Axes

from trimtab.check_loss.check import NOT_JUDGED, Answer
from trimtab.check_loss.identification import reference
from trimtab.check_loss.probes import DRIFT, MISMATCH, Loss, Probe
from trimtab.check_loss.readings import ADVANTAGES, Readings
from trimtab.objectives import Objective
from trimtab.pages.charts import BLUE, INK, VERMILLION, digits, draw, log_ticks
from trimtab.pages.page import Card, Cell, Chart, Charts, Note, Page, Section, Table, Verdict

HOW_TO_READ = (
    "How strongly a token pulls at the policy when its ratio is not 1, relative to a ratio of 1. At 0 it is clipped or "
    "dropped; where the line keeps rising nothing bounds it."
)


def page(answer: Answer, loss: Loss, objective: Objective, command: str) -> str:
    """Returns the page as HTML. command: the command line that makes the page again."""
    actual, expected = Readings(loss), reference(objective)
    sections = [Section("", [Verdict("good" if answer.equal else "warn", [("verdict", answer.verdict)])])]
    if rows := [[Cell(found.kind, note=found.text)] for found in (*answer.differences, *answer.notes)]:
        sections.append(Section("Differences", [Table(("what differs, and what to change",), rows)]))
    paint = partial(_paint, actual=actual, expected=expected, name=objective.name)
    names = {expected.label(probe): probe for probe in (DRIFT, MISMATCH)}
    charts = [Chart(f"Against {name}", draw(name, partial(paint, probe=probe))) for name, probe in names.items()]
    sections.append(Section("Weight of the gradient", [Note(HOW_TO_READ), Charts(charts)]))
    if answer.nearest:
        lines = "\n".join(["[objective]", *answer.nearest[0].lines])
        sections.append(Section("In a recipe", [Card(code=lines), *([Note(answer.others)] if answer.others else [])]))
    sections.append(Section("Again, and in continuous integration", [Card(code=command), Note(NOT_JUDGED)]))
    return Page("Trimtab check-loss", answer.function, sections, [("called with", answer.inputs)]).html()


def _paint(axes: Axes, actual: Readings, expected: Readings, probe: Probe, name: str) -> None:
    """Draws weights to a little beyond the outermost bound. The top of a much larger weight is cut off."""
    bounds = [bend.x for readings in (actual, expected) for bends in readings.bends(probe).values() for bend in bends]
    reach = min(3.0, max(math.log(2), 1.2 * max(map(abs, bounds), default=0.0)))
    shifts = torch.linspace(-reach, reach, 121).double()
    top = 0.0
    for (positive, advantage), color in zip(ADVANTAGES.items(), (BLUE, VERMILLION), strict=True):
        sign = "A > 0" if positive else "A < 0"
        own, wanted = (readings.weights(probe, shifts, advantage) for readings in (actual, expected))
        axes.plot(shifts.exp(), wanted, color=color, linewidth=5, alpha=0.3, label=f"{name}, {sign}")
        axes.plot(shifts.exp(), own, color=color, linestyle="--", label=f"this loss, {sign}")
        highest, highest_own = (float(weights.nan_to_num().max()) for weights in (wanted, own))
        top = max(top, highest, min(highest_own, 4 * highest))
    axes.axvline(1.0, color=INK, linewidth=0.6, linestyle=":")
    axes.set_xscale("log")
    log_ticks(axes.xaxis)
    digits(axes.yaxis, 3)
    axes.set(xlabel=f"ratio {expected.label(probe)}", ylabel="weight of the gradient", ylim=(-0.04 * top, 1.06 * top))
