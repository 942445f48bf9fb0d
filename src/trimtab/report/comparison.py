"""A comparison of several runs, as one HTML page and as data."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from trimtab.intervals import Interval, rule
from trimtab.pages.render import render, short, write
from trimtab.report.cautions import cautions, same_measure
from trimtab.report.comparison_figures import BANDS_UP_TO, THIN_UP_TO, draw_panels, picture, swatch
from trimtab.report.curves import AVERAGED_FROM
from trimtab.report.differences import align, differing_keys, equation_of
from trimtab.report.groups import Group, Groups, listed, named_runs, plain, written
from trimtab.report.summary_columns import (
    Column,
    Outcome,
    Target,
    accuracy_of,
    by_seed,
    choose_target,
    goal_columns,
    outcome,
    way_columns,
)
from trimtab.runs.reader import read_run

PICTURE = "comparison.png"
_ACROSS = 4  # groups beside each other in a table


@dataclass(frozen=True, eq=False)
class Comparison:
    """Everything the page says, as data."""

    groups: list[Group]
    cautions: list[str]
    target: Target
    goals: list[Outcome]
    way: list[Outcome]
    differences: Mapping[str, list[Any]]
    equations: Mapping[str, str]


def compare(found: Groups, *, target: float | None = None) -> Comparison:
    """`target` is the held-out accuracy in (0, 1] that "how soon" is about; default: chosen from the runs."""
    groups = found.groups
    goal = choose_target(groups, target)
    judged = same_measure(groups)
    goals = [outcome(column, groups, judged=judged) for column in goal_columns(goal)]
    way = [outcome(column, groups) for column in way_columns()]
    equations, notes = _equations(groups)
    return Comparison(
        groups=groups,
        cautions=[*found.notes, *(cautions(groups) if len(groups) > 1 else ()), *notes],
        target=goal,
        goals=[item for item in goals if item],
        way=[item for item in way if item and not _never(item)],
        differences=differing_keys(groups),
        equations=equations,
    )


def write_comparison(runs: Mapping[str, Sequence[Path]], path: Path) -> Path:
    """Write the page `path` and `comparison.png` beside it. `runs` maps a label to the run directories of its seeds.

    Raises `TrimtabError` when there is nothing to compare or a run's files are missing, empty or damaged.
    """
    return write_page(compare(named_runs(runs)), path)


def write_page(comparison: Comparison, path: Path) -> Path:
    """The page `path` and, beside it, the picture for documents that cannot hold a page."""
    write(path.parent / PICTURE, picture(comparison.groups))
    return write(path, render("comparison.html.j2", _values(comparison, path.parent)).encode())


def as_data(comparison: Comparison) -> dict[str, Any]:
    """The tables for programs: names as on the page, numbers in full, null for what was not measured."""
    columns = [*comparison.goals, *comparison.way]
    return {
        "groups": [
            {
                "name": group.name,
                "runs": [
                    {"path": str(run.path), "seed": seed, **numbers, "steps": run.last["step"]}
                    for run, seed, numbers in zip(group.runs, group.seeds, by_seed(columns, index), strict=True)
                ],
                "results": {item.column.key: _numbers(item.intervals[index]) for item in columns},
                "best": [item.column.key for item in columns if item.winner == index],
                "equation": comparison.equations[group.name],
            }
            for index, group in enumerate(comparison.groups)
        ],
        "target": {"accuracy": comparison.target.accuracy, "why": comparison.target.why},
        "differences": {
            key: {group.name: value for group, value in zip(comparison.groups, values, strict=True)}
            for key, values in comparison.differences.items()
        },
        "warnings": comparison.cautions,
    }


def held_out(runs: Mapping[str, Sequence[Path]]) -> dict[str, float | str]:
    """Held-out greedy accuracy after training, by label: each seed, and their mean where there are several."""
    summary: dict[str, float | str] = {}
    for label, folders in runs.items():
        found = [accuracy_of(read_run(Path(folder))) for folder in folders]
        values = [math.nan if seen is None or seen.after is None else seen.after for seen in found]
        each = "  ".join("not measured" if math.isnan(value) else f"{value:.3f}" for value in values)
        mean = f"  (mean {np.mean(values):.3f})" if len(values) > 1 and not math.isnan(sum(values)) else ""
        summary[f"{label}, held-out accuracy after"] = each + mean
    return summary


def _never(item: Outcome) -> bool:
    """Updates skipped in no run are not worth a column."""
    return item.column.key == "optim/skipped" and not any(value for seeds in item.values for value in seeds)


def _equations(groups: Sequence[Group]) -> tuple[dict[str, str], list[str]]:
    """That of every group's first run, and a note where seeds calibrated different bounds."""
    found = {group.name: [equation_of(run.config, run.last) for run in group.runs] for group in groups}
    notes = [
        f"{name}: every seed calibrated bounds of its own; the equation is that of the first."
        for name, equations in found.items()
        if len(set(equations)) > 1
    ]
    return {name: equations[0] for name, equations in found.items()}, notes


def _values(comparison: Comparison, folder: Path) -> dict[str, Any]:
    groups, figures = comparison.groups, draw_panels(comparison.groups)
    names = [group.name for group in groups]
    return {
        "title": " against ".join(names) if len(names) <= 4 else f"{len(names)} groups of runs",
        "description": plain(_shared(groups, "description") or ""),
        "facts": _facts(groups),
        "cautions": comparison.cautions,
        "legend": [(swatch(index), group.name, _seeds(group)) for index, group in enumerate(groups)],
        "panels": [(title, svg, listed(missing)) for title, svg, missing in figures.drawn],
        "absent": figures.absent,
        "zero": figures.zero,
        "rules": _rules(groups),
        "drawing": _drawing(groups),
        "averages": _averages(groups),
        "picture": PICTURE,
        "target": comparison.target,
        "tables": [
            ("Results", _table(comparison.goals, names)),
            ("On the way", _table(comparison.way, names)),
        ],
        "differences": _differences(comparison),
        "parts": [
            ([(_who(reading.names, names), reading.pieces) for reading in part.readings], listed(part.without))
            for part in align(comparison.equations)
        ],
        "each": _each(comparison, folder),
    }


def _facts(groups: Sequence[Group]) -> list[tuple[str, str]]:
    """What all runs share; what differs is in the table of differences."""
    facts = [("runs", str(sum(len(group.runs) for group in groups)))]
    for name, key in (("model", "model.path"), ("task", "task.name"), ("lr", "optim.lr"), ("steps", "trainer.steps")):
        value = _shared(groups, key)
        if value is not None:
            facts.append((name, written(value)))
    return facts


def _shared(groups: Sequence[Group], key: str) -> Any:
    values = [group.config.get(key) for group in groups]
    return values[0] if all(value == values[0] for value in values) else None


def _seeds(group: Group) -> str:
    seeds = ", ".join(str(seed) for seed in group.seeds[:6]) + (", …" if len(group.seeds) > 6 else "")
    return f"{'seed' if len(group.seeds) == 1 else 'seeds'} {seeds}"


def _rules(groups: Sequence[Group]) -> list[str]:
    """How the intervals of this page are to be read."""
    counts = sorted({len(group.runs) for group in groups})
    found = [f"With {count} seeds: {rule(count)}." for count in counts if count > 1]
    if 1 in counts:
        found.append("Groups of one seed have no interval.")
    return found


def _drawing(groups: Sequence[Group]) -> str:
    if len(groups) > BANDS_UP_TO:
        return "With so many groups only the means are drawn."
    bands = "Bands run from the lowest seed to the highest." if any(len(group.runs) > 1 for group in groups) else ""
    thin = "Thin lines are single seeds." if any(1 < len(group.runs) <= THIN_UP_TO for group in groups) else ""
    return f"{bands} {thin}".strip()


def _averages(groups: Sequence[Group]) -> str:
    if len(groups) > BANDS_UP_TO or all(run.last["step"] < AVERAGED_FROM for group in groups for run in group.runs):
        return ""
    return (
        f"From {AVERAGED_FROM} steps on, a thick line is the mean of the last twentieth of the steps, looking back "
        "only, and what was logged lies thin beneath it; accuracies, rates and logarithmic axes are drawn as logged."
    )


def _table(found: Sequence[Outcome], names: Sequence[str]) -> dict[str, Any]:
    """One row a group: mean, interval, and which is best."""
    rows = []
    for index, name in enumerate(names):
        cells = [_cell(item, index) for item in found]
        rows.append({"name": name, "swatch": swatch(index), "cells": cells})
    return {"titles": [item.column.title for item in found], "rows": rows}


def _cell(item: Outcome, index: int) -> dict[str, Any]:
    known, values = item.intervals[index], item.values[index]
    if known is None:
        return {"mean": "–", "range": "", "best": False}
    ends = f"[{_say(item.column, known.low)}, {_say(item.column, known.high)}]" if known.high > known.low else ""
    # A mean over part of the seeds must not look like one over all.
    part = f" {known.count} of {len(values)}" if known.count < len(values) else ""
    return {"mean": _say(item.column, known.mean), "range": (ends + part).strip(), "best": item.winner == index}


def _say(column: Column, value: float) -> str:
    if value == 0:
        return "0"
    if column.form == "decades" or abs(value) < (0.01 if column.form == "number" else 5e-4):
        return short(value)
    if column.form == "whole" or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if column.form == "number" else f"{value:.3f}"


def _differences(comparison: Comparison) -> dict[str, Any]:
    """Keys down and groups across, or the other way round where many groups would make the table wide."""
    names = [group.name for group in comparison.groups]
    rows = [(key, [written(value) for value in row]) for key, row in comparison.differences.items()]
    if len(names) <= _ACROSS or len(rows) > 2 * len(names):
        return {"corner": "key", "across": names, "rows": rows}
    columns = [(name, [row[index] for _, row in rows]) for index, name in enumerate(names)]
    return {"corner": "group", "across": [key for key, _ in rows], "rows": columns if rows else []}


def _who(names: Sequence[str], everyone: Sequence[str]) -> str:
    return "all" if len(names) == len(everyone) else listed(names)


def _each(comparison: Comparison, folder: Path) -> dict[str, Any]:
    """Every run on a line, with its own report where there is one."""
    columns = [item.column for item in comparison.goals]
    rows = []
    for index, group in enumerate(comparison.groups):
        numbers = by_seed(comparison.goals, index)
        for run, seed, found in zip(group.runs, group.seeds, numbers, strict=True):
            cells = [found[column.key] for column in columns]
            rows.append(
                {
                    "group": group.name,
                    "run": plain(run.path.name),
                    "link": _link(run.path / "report.html", folder),
                    "seed": written(seed),
                    "cells": [
                        "–" if value is None else _say(column, value)
                        for column, value in zip(columns, cells, strict=True)
                    ],
                }
            )
    return {"titles": [column.title for column in columns], "rows": rows}


def _link(report: Path, folder: Path) -> str:
    """From the page to a run's own report; empty where there is none."""
    # Quoted and begun with a dot: a folder's name must not read as a scheme or a query.
    return f"./{quote(os.path.relpath(report, folder))}" if report.exists() else ""


def _numbers(found: Interval | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "mean": found.mean,
        "low": found.low,
        "high": found.high,
        "seeds": found.count,
        "interval": rule(found.count),
    }
