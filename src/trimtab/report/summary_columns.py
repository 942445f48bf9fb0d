"""The table of a comparison: a row for each group, a column for each number, means and intervals over seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from markupsafe import Markup

from trimtab.intervals import UNBOUNDED, SeedMean, best, seed_interval
from trimtab.pages.page import Cell, Table
from trimtab.report.groups import Group
from trimtab.runs.reader import Accuracy, Run
from trimtab.text import short

Form = Literal["share", "number", "decades", "whole"]
Pick = Callable[[Run], float | None]
SHARE_LIMITS = (0.0, 1.0)


@dataclass(frozen=True)
class Column:
    """One number of a run.

    better: the better direction; None for descriptive numbers and for wall-clock seconds, which are comparable only
    between runs that had an idle machine to themselves.
    form: a share with three decimals, a number with three digits, one that spans decades, or a whole number.
    limits: the range of possible values.
    """

    key: str
    title: str
    pick: Pick
    better: Literal["high", "low"] | None = None
    form: Form = "share"
    limits: tuple[float, float] = (0.0, math.inf)


@dataclass(frozen=True)
class Outcome:
    """One column over all groups: a value per seed (None: not measured), intervals, and the index of the winner."""

    column: Column
    values: list[list[float | None]]
    intervals: list[SeedMean | None]
    winner: int | None


def accuracy_of(run: Run) -> Accuracy | None:
    """Returns the held-out accuracy on the run's task, or None if it was not measured."""
    return next(iter(run.accuracy().values()), None)


def outcome(column: Column, groups: Sequence[Group], *, judged: bool = True) -> Outcome | None:
    """Returns the column over all groups, or None if no run measured it.

    A winner is determined only if every seed of every group was measured and `judged`, for comparable groups, is set.
    """
    values = [[column.pick(run) for run in group.runs] for group in groups]
    intervals = [seed_interval([value for value in seeds if value is not None], column.limits) for seeds in values]
    if not any(intervals):
        return None
    complete = all(value is not None for seeds in values for value in seeds)
    judged = judged and complete and column.better is not None
    return Outcome(column, values, intervals, best(intervals, highest=column.better == "high") if judged else None)


def _accuracy(run: Run, moment: Literal["before", "after"]) -> float | None:
    accuracy = accuracy_of(run)
    return None if accuracy is None else getattr(accuracy, moment)


def _best(run: Run) -> float | None:
    accuracy = accuracy_of(run)
    return float(accuracy.values.max()) if accuracy and len(accuracy.values) else None


def _clipped(run: Run) -> float | None:
    _, shares = run.clipped()
    return float(shares.mean()) if len(shares) else None


def _of(reduce: Callable[[np.ndarray], np.floating], *keys: str) -> Pick:
    """Returns a function for the reduced values of the first of `keys` that a run logged."""

    def pick(run: Run) -> float | None:
        values = next((logged for key in keys if len(logged := run.series(key)[1])), None)
        return None if values is None else float(reduce(values))

    return pick


def _last_tenth(values: np.ndarray) -> np.floating:
    return values[-max(len(values) // 10, 1) :].mean()


def summary_table(outcomes: Sequence[Outcome], names: Sequence[str], marks: Sequence[Markup]) -> Table:
    """Returns one row per group: mean, interval, and whether it is best. marks: before the names."""
    rows = [
        [Cell(name, mark=mark), *(_cell(item, index) for item in outcomes)]
        for index, (name, mark) in enumerate(zip(names, marks, strict=True))
    ]
    return Table(("group", *(item.column.title for item in outcomes)), rows, numeric=range(1, len(outcomes) + 1))


def _cell(item: Outcome, index: int) -> Cell:
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
    Column("accuracy/before", "held-out before", lambda run: _accuracy(run, "before"), limits=SHARE_LIMITS),
    Column("accuracy/after", "held-out after", lambda run: _accuracy(run, "after"), "high", limits=SHARE_LIMITS),
    Column("accuracy/best", "best held-out", _best, "high", limits=SHARE_LIMITS),
    Column("reward/last", "reward, last tenth", _of(_last_tenth, "reward/mean"), "high", limits=UNBOUNDED),
    Column("steps", "steps", lambda run: float(run.last["step"]), form="whole"),
)
PROCESS_COLUMNS = (
    Column("mismatch/k3", "k3, median", _of(np.median, "mismatch/k3"), "low", form="decades"),
    Column("mismatch/ess_token", "ESS, lowest", _of(np.min, "mismatch/ess_token"), "high", limits=SHARE_LIMITS),
    Column("mismatch/ratio_q01", "ratio q01, lowest", _of(np.min, "mismatch/ratio_q01"), form="number"),
    Column("mismatch/ratio_q99", "ratio q99, highest", _of(np.max, "mismatch/ratio_q99"), form="number"),
    Column("optim/grad_norm", "grad norm, median", _of(np.median, "optim/grad_norm"), form="decades"),
    Column("entropy/mean", "entropy, last tenth", _of(_last_tenth, "entropy/mean", "entropy/rollout")),
    Column("length/mean", "length, last tenth", _of(_last_tenth, "length/mean"), form="number"),
    Column("clip/share", "clipped, mean", _clipped, limits=SHARE_LIMITS),
    Column("reject/tokens", "rejected, mean", _of(np.mean, "reject/tokens"), limits=SHARE_LIMITS),
    Column("optim/skipped", "skipped updates", _of(np.sum, "optim/skipped"), "low", form="whole"),
    Column("time/step", "seconds a step", _of(np.median, "time/step"), form="number"),
)
"""Mismatch, optimization and speed during the run."""
