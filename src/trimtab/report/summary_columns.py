"""The table of a comparison: a row for each group, a column for each number, means and intervals over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup

from trimtab.intervals import UNBOUNDED, SeedMean, may_be_best, seed_interval
from trimtab.pages.page import Cell, Table
from trimtab.report.groups import Group
from trimtab.runs.summary import RunSummary, summarize
from trimtab.text import short

Form = Literal["share", "number", "decades", "whole"]
SHARE_LIMITS = (0.0, 1.0)


@dataclass(frozen=True)
class Column:
    """One number of a run. key: a field of `RunSummary`.

    better: the better direction; None for descriptive numbers and for wall-clock seconds, which are comparable only
    between runs that had an idle machine to themselves.
    form: a share with three decimals, a number with three digits, one that spans decades, or a whole number.
    limits: the range of possible values.
    """

    key: str
    title: str
    better: Literal["high", "low"] | None = None
    form: Form = "share"
    limits: tuple[float, float] = (0.0, math.inf)


@dataclass(frozen=True)
class ColumnResult:
    """One column over all groups: a value per seed (None: not measured), intervals, and the index of the winner."""

    column: Column
    values: list[list[float | None]]
    intervals: list[SeedMean | None]
    winner: int | None


def summaries_of(group: Group) -> list[RunSummary]:
    """Returns the numbers of each run; its time is that of its steps."""
    return [summarize(run, "done", float(run.series("time/step")[1].sum())) for run in group.runs]


def outcome(
    column: Column, groups: Sequence[Group], summaries: Sequence[Sequence[RunSummary]], *, judged: bool = True
) -> ColumnResult | None:
    """Returns the column over the runs of all groups, or None if no run measured it.

    A winner is determined only where every run was measured, no group has a seed twice, and `judged`, for comparable
    groups, is set.
    """
    values = [[getattr(summary, column.key) for summary in runs] for runs in summaries]
    known = [[value for value in seeds if value is not None] for seeds in values]
    if not any(known):
        return None
    intervals = [seed_interval(seeds, column.limits) for seeds in known]
    judged = judged and known == values and all(len(set(group.seeds)) == len(group.seeds) for group in groups)
    return ColumnResult(column, values, intervals, _winner(column, groups, known) if judged else None)


def _winner(column: Column, groups: Sequence[Group], values: Sequence[Sequence[float]]) -> int | None:
    """Returns the only group that may be the best, by differences paired by seed, or None."""
    if column.better is None or len(groups) < 2:
        return None
    sign = 1 if column.better == "high" else -1
    signed = [[sign * value for value in seeds] for seeds in values]
    by_seed = [dict(zip(group.seeds, seeds, strict=True)) for group, seeds in zip(groups, signed, strict=True)]
    stays = may_be_best(by_seed)
    return stays.index(True) if sum(stays) == 1 else None


def summary_table(outcomes: Sequence[ColumnResult], names: Sequence[str], marks: Sequence[Markup]) -> Table:
    """Returns one row per group: mean, interval, and whether it is best. marks: before the names."""
    rows = [
        [Cell(name, mark=mark), *(_cell(item, index) for item in outcomes)]
        for index, (name, mark) in enumerate(zip(names, marks, strict=True))
    ]
    return Table(("group", *(item.column.title for item in outcomes)), rows, numeric=range(1, len(outcomes) + 1))


def _cell(item: ColumnResult, index: int) -> Cell:
    interval, values = item.intervals[index], item.values[index]
    if interval is None:
        return Cell("–")
    ends = (
        f"[{format_in(item.column, interval.low)}, {format_in(item.column, interval.high)}]"
        if interval.high > interval.low
        else ""
    )
    # A mean over some of the seeds must be recognizable.
    seeds = f" {interval.count} of {len(values)}" if interval.count < len(values) else ""
    return Cell(format_in(item.column, interval.mean), note=(ends + seeds).strip(), strong=item.winner == index)


def format_in(column: Column, value: float | None) -> str:
    """Returns a value in the form of its column; a dash for what was not measured."""
    if value is None:
        return "–"
    if value == 0:
        return "0"
    if column.form == "decades" or abs(value) < (0.01 if column.form == "number" else 5e-4):
        return short(value)
    if column.form == "whole" or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if column.form == "number" else f"{value:.3f}"


RESULT_COLUMNS = (
    Column("accuracy_before", "held-out before", limits=SHARE_LIMITS),
    Column("accuracy", "held-out after", "high", limits=SHARE_LIMITS),
    Column("accuracy_best", "best held-out", "high", limits=SHARE_LIMITS),
    Column("reward", "reward, last tenth", "high", limits=UNBOUNDED),
    Column("steps", "steps", form="whole"),
)
PROCESS_COLUMNS = (
    Column("k3", "k3, last", "low", form="decades"),
    Column("k3_worst", "k3, highest", "low", form="decades"),
    Column("ess_worst", "ESS, lowest", "high", limits=SHARE_LIMITS),
    Column("log_ratio_seq_worst", "largest |log-ratio| of a sequence", form="number"),
    Column("grad_norm_max", "grad norm, highest", form="decades"),
    Column("clipped", "clipped, mean", limits=SHARE_LIMITS),
    Column("rejected", "rejected, mean", limits=SHARE_LIMITS),
    Column("skipped", "skipped updates", "low", form="whole"),
    Column("seconds", "seconds in steps", form="number"),
)
"""Mismatch, optimization and speed during the run."""
