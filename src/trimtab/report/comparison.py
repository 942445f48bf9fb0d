"""Compares several runs: one HTML page, one picture, and the same content as data."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from trimtab.intervals import SeedMean, interval_method
from trimtab.pages.render import render, short
from trimtab.report.cautions import cautions, same_measure
from trimtab.report.comparison_figures import BANDS_UP_TO, THIN_UP_TO, draw_panels, picture, swatch
from trimtab.report.curves import AVERAGED_FROM
from trimtab.report.differences import align, differing_keys, equation_of
from trimtab.report.groups import Group, Groups, format_value, join_names, named_runs, plain
from trimtab.report.summary_columns import (
    Column,
    Outcome,
    Target,
    accuracy_of,
    by_seed,
    choose_target,
    outcome,
    process_columns,
    result_columns,
)
from trimtab.runs.atomic import write_output
from trimtab.runs.reader import read_run

PICTURE = "comparison.png"
_MAX_GROUP_COLUMNS = 4


@dataclass(frozen=True, eq=False)
class Comparison:
    """The content of the page as data."""

    groups: list[Group]
    cautions: list[str]
    target: Target
    results: list[Outcome]
    process_metrics: list[Outcome]
    differences: Mapping[str, list[Any]]
    equations: Mapping[str, str]


def compare(grouped: Groups, *, target: float | None = None) -> Comparison:
    """Returns the comparison of all groups.

    `target` is the held-out accuracy in (0, 1] for the columns "steps to" and "seconds to"; by default it is chosen
    from the runs.
    """
    groups = grouped.groups
    accuracy_target = choose_target(groups, target)
    comparable = same_measure(groups)
    results = [outcome(column, groups, judged=comparable) for column in result_columns(accuracy_target)]
    process_metrics = [outcome(column, groups) for column in process_columns()]
    equations, notes = _equations(groups)
    return Comparison(
        groups=groups,
        cautions=[*grouped.notes, *(cautions(groups) if len(groups) > 1 else ()), *notes],
        target=accuracy_target,
        results=[item for item in results if item],
        process_metrics=[item for item in process_metrics if item and not _is_always_zero(item)],
        differences=differing_keys(groups),
        equations=equations,
    )


def write_comparison(runs: Mapping[str, Sequence[Path]], path: Path) -> Path:
    """Write the page `path` and `comparison.png` beside it, and return `path`.

    `runs` maps a label to the run directories of its seeds. Raises `TrimtabError` when there is nothing to compare or
    a run's files are missing, empty or damaged.
    """
    return write_page(compare(named_runs(runs)), path)


def write_page(comparison: Comparison, path: Path) -> Path:
    """Write the page `path` and, beside it, a picture for documents that cannot include HTML."""
    write_output(path.parent / PICTURE, picture(comparison.groups))
    return write_output(path, render("comparison.html.j2", _template_values(comparison, path.parent)).encode())


def as_data(comparison: Comparison) -> dict[str, Any]:
    """Returns the tables for JSON: names as on the page, unrounded numbers, null for what was not measured."""
    columns = [*comparison.results, *comparison.process_metrics]
    return {
        "groups": [
            {
                "name": group.name,
                "runs": [
                    {"path": str(run.path), "seed": seed, **numbers, "steps": run.last["step"]}
                    for run, seed, numbers in zip(group.runs, group.seeds, by_seed(columns, index), strict=True)
                ],
                "results": {item.column.key: _interval_data(item.intervals[index]) for item in columns},
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
    """Returns the held-out greedy accuracy after training by label: each seed, and the mean of several seeds."""
    summary: dict[str, float | str] = {}
    for label, folders in runs.items():
        accuracies = [accuracy_of(read_run(Path(folder))) for folder in folders]
        values = [math.nan if accuracy is None or accuracy.after is None else accuracy.after for accuracy in accuracies]
        shown = "  ".join("not measured" if math.isnan(value) else f"{value:.3f}" for value in values)
        mean = f"  (mean {np.mean(values):.3f})" if len(values) > 1 and not math.isnan(sum(values)) else ""
        summary[f"{label}, held-out accuracy after"] = shown + mean
    return summary


def _is_always_zero(item: Outcome) -> bool:
    """Whether this is the column of skipped updates and no run skipped one."""
    return item.column.key == "optim/skipped" and not any(value for seeds in item.values for value in seeds)


def _equations(groups: Sequence[Group]) -> tuple[dict[str, str], list[str]]:
    """Returns the equation of every group's first run, and a note where its seeds calibrated different bounds."""
    by_group = {group.name: [equation_of(run.config, run.last) for run in group.runs] for group in groups}
    notes = [
        f"{name}: every seed calibrated its own bounds; the equation is that of the first seed."
        for name, equations in by_group.items()
        if len(set(equations)) > 1
    ]
    return {name: equations[0] for name, equations in by_group.items()}, notes


def _template_values(comparison: Comparison, folder: Path) -> dict[str, Any]:
    groups, figures = comparison.groups, draw_panels(comparison.groups)
    names = [group.name for group in groups]
    runs = {
        "legend": [(swatch(index), group.name, _seed_list(group)) for index, group in enumerate(groups)],
        "panels": [(title, svg, join_names(missing)) for title, svg, missing in figures.drawn],
        "absent": figures.absent,
        "zero": figures.zero,
        "rules": _interval_notes(groups),
        "drawing": _band_note(groups),
        "averages": _average_note(groups),
        "picture": PICTURE,
        "target": comparison.target,
        "tables": [
            ("Results", _summary_table(comparison.results, names)),
            ("On the way", _summary_table(comparison.process_metrics, names)),
        ],
        "differences": _difference_table(comparison),
        "parts": [
            (
                [(_names_or_all(reading.names, names), reading.pieces) for reading in part.readings],
                join_names(part.without),
            )
            for part in align(comparison.equations)
        ],
        "each": _run_table(comparison, folder),
    }
    description = plain(_shared(groups, "description") or "")
    return {
        "over": "Trimtab comparison",
        "title": " against ".join(names) if len(names) <= 4 else f"{len(names)} groups of runs",
        "notes": [description] if description else [],
        "facts": _facts(groups),
        "verdict": "",
        "cautions": comparison.cautions,
        "scores": None,
        "runs": runs,
    }


def _facts(groups: Sequence[Group]) -> list[tuple[str, str]]:
    """Returns the settings that all runs share, for the page's header."""
    facts = [("runs", str(sum(len(group.runs) for group in groups)))]
    for name, key in (("model", "model.path"), ("task", "task.name"), ("lr", "optim.lr"), ("steps", "trainer.steps")):
        value = _shared(groups, key)
        if value is not None:
            facts.append((name, format_value(value)))
    return facts


def _shared(groups: Sequence[Group], key: str) -> Any:
    values = [group.config.get(key) for group in groups]
    return values[0] if all(value == values[0] for value in values) else None


def _seed_list(group: Group) -> str:
    seeds = ", ".join(str(seed) for seed in group.seeds[:6]) + (", …" if len(group.seeds) > 6 else "")
    return f"{'seed' if len(group.seeds) == 1 else 'seeds'} {seeds}"


def _interval_notes(groups: Sequence[Group]) -> list[str]:
    """Returns sentences that say what the intervals of this page are."""
    counts = sorted({len(group.runs) for group in groups})
    sentences = [f"With {count} seeds: {interval_method(count)}." for count in counts if count > 1]
    if 1 in counts:
        sentences.append("Groups of one seed have no interval.")
    return sentences


def _band_note(groups: Sequence[Group]) -> str:
    if len(groups) > BANDS_UP_TO:
        return "With so many groups only the means are drawn."
    bands = "Bands run from the lowest seed to the highest." if any(len(group.runs) > 1 for group in groups) else ""
    thin = "Thin lines are single seeds." if any(1 < len(group.runs) <= THIN_UP_TO for group in groups) else ""
    return f"{bands} {thin}".strip()


def _average_note(groups: Sequence[Group]) -> str:
    if len(groups) > BANDS_UP_TO or all(run.last["step"] < AVERAGED_FROM for group in groups for run in group.runs):
        return ""
    return (
        f"From {AVERAGED_FROM} steps on, a thick line is the mean of the last twentieth of the steps, looking back "
        "only, and what was logged lies thin beneath it; accuracies, rates and logarithmic axes are drawn as logged."
    )


def _summary_table(outcomes: Sequence[Outcome], names: Sequence[str]) -> dict[str, Any]:
    """Returns one row per group: mean, interval, and whether it is best."""
    rows = []
    for index, name in enumerate(names):
        cells = [_cell(item, index) for item in outcomes]
        rows.append({"name": name, "swatch": swatch(index), "cells": cells})
    return {"titles": [item.column.title for item in outcomes], "rows": rows}


def _cell(item: Outcome, index: int) -> dict[str, Any]:
    interval, values = item.intervals[index], item.values[index]
    if interval is None:
        return {"mean": "–", "range": "", "best": False}
    ends = (
        f"[{_format(item.column, interval.low)}, {_format(item.column, interval.high)}]"
        if interval.high > interval.low
        else ""
    )
    # A mean over some of the seeds must be recognizable.
    seeds = f" {interval.count} of {len(values)}" if interval.count < len(values) else ""
    return {"mean": _format(item.column, interval.mean), "range": (ends + seeds).strip(), "best": item.winner == index}


def _format(column: Column, value: float) -> str:
    if value == 0:
        return "0"
    if column.form == "decades" or abs(value) < (0.01 if column.form == "number" else 5e-4):
        return short(value)
    if column.form == "whole" or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if column.form == "number" else f"{value:.3f}"


def _difference_table(comparison: Comparison) -> dict[str, Any]:
    """Returns the table of differing keys: one column per group, or one row per group where there are many groups."""
    names = [group.name for group in comparison.groups]
    rows = [(key, [format_value(value) for value in row]) for key, row in comparison.differences.items()]
    if len(names) <= _MAX_GROUP_COLUMNS or len(rows) > 2 * len(names):
        return {"corner": "key", "across": names, "rows": rows}
    columns = [(name, [row[index] for _, row in rows]) for index, name in enumerate(names)]
    return {"corner": "group", "across": [key for key, _ in rows], "rows": columns if rows else []}


def _names_or_all(names: Sequence[str], everyone: Sequence[str]) -> str:
    return "all" if len(names) == len(everyone) else join_names(names)


def _run_table(comparison: Comparison, folder: Path) -> dict[str, Any]:
    """Returns one row per run, with a link to its report where it exists."""
    columns = [item.column for item in comparison.results]
    rows = []
    for index, group in enumerate(comparison.groups):
        numbers = by_seed(comparison.results, index)
        for run, seed, values in zip(group.runs, group.seeds, numbers, strict=True):
            shown = [values[column.key] for column in columns]
            rows.append(
                {
                    "group": group.name,
                    "run": plain(run.path.name),
                    "link": _link(run.path / "report.html", folder),
                    "seed": format_value(seed),
                    "cells": [
                        "–" if value is None else _format(column, value)
                        for column, value in zip(columns, shown, strict=True)
                    ],
                }
            )
    return {"titles": [column.title for column in columns], "rows": rows}


def _link(report: Path, folder: Path) -> str:
    """Returns the relative link from the page to a run's report, empty if there is no report."""
    # Quoted and with a leading dot: a folder name must not be parsed as a URL scheme or a query.
    return f"./{quote(os.path.relpath(report, folder))}" if report.exists() else ""


def _interval_data(interval: SeedMean | None) -> dict[str, Any] | None:
    if interval is None:
        return None
    return {
        "mean": interval.mean,
        "low": interval.low,
        "high": interval.high,
        "seeds": interval.count,
        "interval": interval_method(interval.count),
    }
