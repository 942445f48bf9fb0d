"""Compares several runs: as one HTML page, and as data with the same content.

The tables have a row for each group of runs and a column for each number, with means and intervals over seeds.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import numpy as np
from markupsafe import Markup

from trimtab.intervals import (
    PAIRED_FROM,
    STUDENT_FROM,
    UNBOUNDED,
    SeedMean,
    interval_method,
    may_be_best,
    seed_interval,
)
from trimtab.pages.page import Card, Cell, Charts, Fold, Note, Page, Part, Section, Table
from trimtab.report.groups import Group, group_runs, list_cautions, same_measure
from trimtab.report.run_objective import equation_of
from trimtab.report.step_curves import AVERAGED_FROM, BANDS_UP_TO, draw_legend, draw_panels, draw_swatch
from trimtab.runs.atomic import write_output
from trimtab.runs.layout import REPORT
from trimtab.text import format_value, join_names, number, one_line, short

SHARE_LIMITS = (0.0, 1.0)


def format_share(value: float) -> str:
    """Returns a value with three decimals, unless it is too small or too large for them."""
    return f"{value:.3f}" if 5e-4 <= abs(value) < 1000 else number(value)


@dataclass(frozen=True)
class Column:
    """A column of a table: one number of each run."""

    key: str  # a field of `RunSummary`
    title: str
    # The better direction. None for descriptive numbers, and for wall-clock seconds, which are comparable only between
    # runs that had the machine to themselves.
    better: Literal["high", "low"] | None = None
    limits: tuple[float, float] = (0.0, math.inf)  # the range of possible values
    form: Callable[[float], str] = format_share

    def format(self, value: float | None) -> str:
        """Returns a value as text, or a dash if it was not measured."""
        return "–" if value is None else self.form(value)


RESULT_COLUMNS = (
    Column("accuracy_before", "held-out before", limits=SHARE_LIMITS),
    Column("accuracy", "held-out after", "high", limits=SHARE_LIMITS),
    Column("accuracy_best", "best held-out", "high", limits=SHARE_LIMITS),
    Column("reward", "reward, last tenth", "high", limits=UNBOUNDED),
    Column("steps", "steps", form=number),
)
PROCESS_COLUMNS = (
    Column("k3", "k3, last", "low", form=short),
    Column("k3_worst", "k3, highest", "low", form=short),
    Column("ess_worst", "ESS, lowest", "high", limits=SHARE_LIMITS),
    Column("log_ratio_seq_worst", "largest |log-ratio| of a sequence", form=number),
    Column("grad_norm_max", "grad norm, highest", form=short),
    Column("clipped", "clipped, mean", limits=SHARE_LIMITS),
    Column("rejected", "rejected, mean", limits=SHARE_LIMITS),
    Column("skipped", "skipped updates", "low", form=number),
    Column("seconds", "seconds in steps", form=number),
)
"""Mismatch, optimization and speed during the run."""
DRAWING = (
    "Thick lines are means over seeds, at the steps all seeds of a group have. Bands run from the lowest seed to the "
    f"highest. From {AVERAGED_FROM} steps on, a thick line is the mean of the last twentieth of the steps, and what "
    "was logged lies thin beneath it; accuracies, rates and logarithmic axes are drawn as logged. Of more than "
    f"{BANDS_UP_TO} groups only the means are drawn."
)
INTERVALS = (
    f"Mean over seeds and its interval: {interval_method(STUDENT_FROM)}, or the range of fewer than {STUDENT_FROM} "
    f"seeds. Bold: with 95% the best, by t tests of differences paired by seed, of at least {PAIRED_FROM} seeds in "
    "common; no bold means that these runs do not tell. Wall-clock seconds are never judged: runs that did not take "
    "turns on an idle machine tell nothing about it."
)


@dataclass(frozen=True)
class ColumnResult:
    """One column over all groups."""

    column: Column
    values: list[list[float | None]]  # by group and seed; None: not measured
    intervals: list[SeedMean | None]  # by group
    winner: int | None  # index of the best group, if there is one


@dataclass(frozen=True, eq=False)
class RunComparison:
    groups: list[Group]
    cautions: list[str]
    results: list[ColumnResult]
    process_metrics: list[ColumnResult]
    differences: Mapping[str, list[Any]]
    equations: Mapping[str, str]


def compare(runs: Sequence[Path]) -> RunComparison:
    """Returns the comparison of runs; runs that differ only in the seed form one group.

    Raises `TrimtabError` if files of a run are missing, empty or damaged.
    """
    groups, notes = group_runs(runs)
    comparable = same_measure(groups)
    results = [compare_column(column, groups, judged=comparable) for column in RESULT_COLUMNS]
    process_metrics = [compare_column(column, groups) for column in PROCESS_COLUMNS]
    equations = {group.name: [equation_of(run.config, run.last) for run in group.runs] for group in groups}
    notes += list_cautions(groups) if len(groups) > 1 else []
    notes += [
        f"{name}: every seed calibrated its own bounds; the equation is that of the first seed."
        for name, by_seed in equations.items()
        if len(set(by_seed)) > 1
    ]
    return RunComparison(
        groups=groups,
        cautions=notes,
        results=[item for item in results if item],
        process_metrics=[item for item in process_metrics if item],
        differences=differing_keys(groups),
        equations={name: by_seed[0] for name, by_seed in equations.items()},
    )


def write_page(comparison: RunComparison, path: Path) -> Path:
    """Writes the page and returns `path`."""
    return write_output(path, _page(comparison, path.parent).html().encode())


def as_data(comparison: RunComparison) -> dict[str, Any]:
    """Returns the tables for JSON: group names as on the page, unrounded numbers, null if not measured."""
    columns = [*comparison.results, *comparison.process_metrics]
    return {
        "groups": [
            {
                "name": group.name,
                "runs": [
                    {
                        "path": str(run.path),
                        "seed": run.config.get("seed"),
                        **{item.column.key: item.values[index][place] for item in columns},
                    }
                    for place, run in enumerate(group.runs)
                ],
                "results": {item.column.key: _interval_data(item.intervals[index]) for item in columns},
                "best": [item.column.key for item in columns if item.winner == index],
                "equation": comparison.equations[group.name],
            }
            for index, group in enumerate(comparison.groups)
        ],
        "differences": {
            key: {group.name: value for group, value in zip(comparison.groups, values, strict=True)}
            for key, values in comparison.differences.items()
        },
        "warnings": comparison.cautions,
    }


def list_accuracies(groups: Sequence[Group]) -> dict[str, str]:
    """Returns the held-out greedy accuracy after training, by group: the value of each seed, and the mean."""
    summary = {}
    for group in groups:
        values = [run.held_out.after for run in group.runs]
        known = [value for value in values if value is not None]
        shown = "  ".join("not measured" if value is None else f"{value:.3f}" for value in values)
        mean = f"  (mean {np.mean(known):.3f})" if len(known) == len(values) > 1 else ""
        summary[f"{group.name}, held-out accuracy after"] = shown + mean
    return summary


def differing_keys(groups: Sequence[Group]) -> dict[str, list[Any]]:
    """Returns the dotted keys that differ between groups, with one value per group (None if the key is absent)."""
    keys = dict.fromkeys(key for group in groups for key in group.config)
    values = {key: [group.config.get(key) for group in groups] for key in keys}
    return {key: row for key, row in values.items() if any(value != row[0] for value in row)}


def _page(comparison: RunComparison, folder: Path) -> Page:
    groups, results, process = comparison.groups, comparison.results, comparison.process_metrics
    names, marks = [group.name for group in groups], [draw_swatch(index) for index in range(len(groups))]
    drawn, absent, zero = draw_panels(groups)
    drawing = [DRAWING]
    drawing += [f"Logged by no run: {'; '.join(absent)}."] if absent else []
    drawing += [f"0 in all runs: {'; '.join(zero)}."] if zero else []
    return Page(
        kind="Trimtab comparison",
        title=" against ".join(names) if len(names) <= 4 else f"{len(names)} groups of runs",
        description=[text] if (text := one_line(_shared(groups, "description") or "")) else [],
        facts=_facts(groups),
        sections=[
            Section(
                "", [Card("Before comparing", list(map(Note, comparison.cautions)))] if comparison.cautions else []
            ),
            Section("Curves", [draw_legend(names), Charts(drawn), Note(" ".join(drawing))]),
            Section("Results", [summary_table(results, names, marks), Note(INTERVALS)] if results else []),
            Section("On the way", [summary_table(process, names, marks)] if process else []),
            Section("What differs in the configuration", _differences(comparison)),
            Section("What each one minimizes", _equation_cards(comparison.equations)),
            Section("Every run", [_run_table(comparison, folder)]),
        ],
    )


def _facts(groups: Sequence[Group]) -> list[tuple[str, str]]:
    """Returns the settings that all runs share, for the page's header."""
    keys = {"model": "model.path", "task": "task.name", "lr": "optim.lr", "steps": "trainer.steps"}
    shared = {name: _shared(groups, key) for name, key in keys.items()}
    known = [(name, format_value(value)) for name, value in shared.items() if value is not None]
    return [("runs", str(sum(len(group.runs) for group in groups))), *known]


def _shared(groups: Sequence[Group], key: str) -> Any:
    values = [group.config.get(key) for group in groups]
    return values[0] if all(value == values[0] for value in values) else None


def _differences(comparison: RunComparison) -> list[Part]:
    """Returns the table of differing keys, with a column for each group."""
    heads = ["key", *(group.name for group in comparison.groups)]
    rows = [[key, *map(format_value, values)] for key, values in comparison.differences.items()]
    if not rows:
        return [Note("Nothing but seed and out.")]
    note = "Keys that are equal everywhere, seed and out are left out; – stands for a key a recipe does not have."
    return [Table(heads, rows, mono=range(len(heads))), Note(note)]


def _equation_cards(equations: Mapping[str, str]) -> list[Part]:
    """Returns one card for each distinct equation, titled with the groups that minimize it."""
    names: dict[str, list[str]] = {}
    for name, equation in equations.items():
        names.setdefault(equation, []).append(name)
    return [Card(join_names(groups), code=equation) for equation, groups in names.items()]


def _run_table(comparison: RunComparison, folder: Path) -> Fold:
    """Returns a table with one row per run, with a link to the report of the run if it exists."""
    rows = []
    for index, group in enumerate(comparison.groups):
        for place, run in enumerate(group.runs):
            report = run.path / REPORT
            # Quotes and the leading dot keep a folder name from being parsed as a URL scheme or a query.
            link = f"./{quote(os.path.relpath(report, folder))}" if report.exists() else ""
            name = Cell(one_line(run.path.name), link=link)
            cells = [item.column.format(item.values[index][place]) for item in comparison.results]
            rows.append([group.name, name, format_value(run.config.get("seed")), *cells])
    heads = ("group", "run", "seed", *(item.column.title for item in comparison.results))
    return Fold(f"{len(rows)} runs, one by one", [Table(heads, rows, numeric=range(2, len(heads)))])


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


def compare_column(column: Column, groups: Sequence[Group], *, judged: bool = True) -> ColumnResult | None:
    """Returns the column over the runs of all groups, or None if no run measured it.

    A winner is determined only if `judged` is set (the groups are comparable), every run has a value, and no group has
    a seed twice.
    """
    values = [[getattr(summary, column.key) for summary in group.summaries] for group in groups]
    known = [[value for value in seeds if value is not None] for seeds in values]
    if not any(known):
        return None
    intervals = [seed_interval(seeds, column.limits) for seeds in known]
    judged = judged and known == values and all(len(set(group.seeds)) == len(group.seeds) for group in groups)
    return ColumnResult(column, values, intervals, _winner(column, groups, known) if judged else None)


def _winner(column: Column, groups: Sequence[Group], values: Sequence[Sequence[float]]) -> int | None:
    """Returns the index of the group that is the best by differences paired by seed, or None if several may be."""
    if column.better is None or len(groups) < 2:
        return None
    sign = 1 if column.better == "high" else -1
    signed = [[sign * value for value in seeds] for seeds in values]
    by_seed = [dict(zip(group.seeds, seeds, strict=True)) for group, seeds in zip(groups, signed, strict=True)]
    stays = may_be_best(by_seed)
    return stays.index(True) if sum(stays) == 1 else None


def summary_table(outcomes: Sequence[ColumnResult], names: Sequence[str], marks: Sequence[Markup]) -> Table:
    """Returns a table with one row per group: mean, interval, and whether it is the best. `marks` precede the names."""
    rows = [
        [Cell(name, mark=mark), *(_cell(item, index) for item in outcomes)]
        for index, (name, mark) in enumerate(zip(names, marks, strict=True))
    ]
    return Table(("group", *(item.column.title for item in outcomes)), rows, numeric=range(1, len(outcomes) + 1))


def _cell(item: ColumnResult, index: int) -> Cell:
    interval, values = item.intervals[index], item.values[index]
    if interval is None:
        return Cell("–")
    low, high = item.column.format(interval.low), item.column.format(interval.high)
    ends = f"[{low}, {high}]" if interval.high > interval.low else ""
    # Shows that a mean is over some of the seeds only.
    seeds = f" {interval.count} of {len(values)}" if interval.count < len(values) else ""
    return Cell(item.column.format(interval.mean), note=(ends + seeds).strip(), strong=item.winner == index)
