"""Final results of runs per seed with intervals per group, and the time to a given accuracy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from trimtab.intervals import ANYTHING, Interval, best, interval
from trimtab.report.groups import Group
from trimtab.runs.reader import Accuracy, Run

Pick = Callable[[Run], float | None]
CLIPS = ("clip/low", "clip/high", "clip/dual", "clip/second_moment")
# A measurement only after training says that an accuracy was reached, not when.
_LOOKS = 3
_GAIN = 0.8
SHARE = (0.0, 1.0)


@dataclass(frozen=True)
class Column:
    """One number of a run. `better`: which side wins; None for numbers that only describe, and for wall-clock seconds:
    runs that did not take turns on an idle machine do not tell which is faster.

    `form`: a share with three decimals, a number with three digits, one that spans decades, or a whole one. All such
    numbers lie between `limits`.
    """

    key: str
    title: str
    pick: Pick
    better: Literal["high", "low"] | None = None
    form: Literal["share", "number", "decades", "whole"] = "share"
    limits: tuple[float, float] = (0.0, math.inf)


@dataclass(frozen=True)
class Target:
    """Held-out accuracy for "how soon"; None, with the reason, where it cannot be said."""

    accuracy: float | None
    why: str


@dataclass(frozen=True)
class Outcome:
    """One column over all groups: a value for each seed (None: not measured), their interval, and the winner if any."""

    column: Column
    values: list[list[float | None]]
    intervals: list[Interval | None]
    winner: int | None


def accuracy_of(run: Run) -> Accuracy | None:
    """Held-out accuracy on the run's own task."""
    return next(iter(run.accuracy().values()), None)


def clipped(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Share of tokens any clip bound holds, over steps: the bounds hold different tokens, so shares add up."""
    rows = [(row["step"], [row[key] for key in CLIPS if row.get(key) is not None]) for row in run.rows]
    pairs = [(step, sum(shares)) for step, shares in rows if shares]
    return np.array([step for step, _ in pairs], dtype=np.float64), np.array([share for _, share in pairs])


def goal_columns(target: Target) -> list[Column]:
    """What a run is trained for."""
    columns = [
        Column("accuracy/before", "held-out before", lambda run: _accuracy(run, "before"), limits=SHARE),
        Column("accuracy/after", "held-out after", lambda run: _accuracy(run, "after"), "high", limits=SHARE),
        Column("accuracy/best", "best held-out", _best, "high", limits=SHARE),
        Column("reward/last", "reward, last tenth", _last("reward/mean"), "high", limits=ANYTHING),
    ]
    if (goal := target.accuracy) is not None:
        columns += [
            Column("target/steps", f"steps to {goal:g}", lambda run: _reached(run, goal), "low", form="whole"),
            Column("target/seconds", f"seconds to {goal:g}", lambda run: _seconds_to(run, goal), form="number"),
        ]
    return [*columns, Column("steps", "steps", lambda run: float(run.last["step"]), form="whole")]


def way_columns() -> list[Column]:
    """How a run got there."""
    return [
        Column("mismatch/k3", "k3, median", _over("mismatch/k3", np.median), "low", form="decades"),
        Column("mismatch/ess_token", "ESS, lowest", _over("mismatch/ess_token", np.min), "high", limits=SHARE),
        Column("mismatch/ratio_q01", "ratio q01, lowest", _over("mismatch/ratio_q01", np.min), form="number"),
        Column("mismatch/ratio_q99", "ratio q99, highest", _over("mismatch/ratio_q99", np.max), form="number"),
        Column("optim/grad_norm", "grad norm, median", _over("optim/grad_norm", np.median), form="decades"),
        Column("entropy/mean", "entropy, last tenth", _last("entropy/mean", "entropy/rollout")),
        Column("length/mean", "length, last tenth", _last("length/mean"), form="number"),
        Column("clip/share", "clipped, mean", _clipped, limits=SHARE),
        Column("reject/tokens", "rejected, mean", _over("reject/tokens", np.mean), limits=SHARE),
        Column("optim/skipped", "skipped updates", _over("optim/skipped", np.sum), "low", form="whole"),
        Column("time/step", "seconds a step", _over("time/step", np.median), form="number"),
    ]


def outcome(column: Column, groups: Sequence[Group], *, judged: bool = True) -> Outcome | None:
    """None when no run measured it. A winner needs every seed of every group, and `judged`: comparable groups."""
    values = [[column.pick(run) for run in group.runs] for group in groups]
    found = [interval([value for value in seeds if value is not None], column.limits) for seeds in values]
    if not any(found):
        return None
    complete = all(value is not None for seeds in values for value in seeds)
    judged = judged and complete and column.better is not None
    return Outcome(column, values, found, best(found, highest=column.better == "high") if judged else None)


def choose_target(groups: Sequence[Group], wanted: float | None) -> Target:
    """`wanted`, or an accuracy most groups can be expected to pass on their way: most of the best group's gain."""
    found = [[accuracy_of(run) for run in group.runs] for group in groups]
    looks = max((len(seen.steps[seen.steps > 0]) for seeds in found for seen in seeds if seen), default=0)
    if looks < _LOOKS:
        return Target(None, "held-out accuracy was measured too seldom to say how soon one was reached: set eval.every")
    if wanted is not None:
        return Target(wanted, "as asked for")
    before = [seen.before for seeds in found for seen in seeds if seen and seen.before is not None]
    tops = [[float(seen.values.max()) for seen in seeds if seen and len(seen.values)] for seeds in found]
    start, top = (float(np.mean(before)) if before else 0.0), max(float(np.mean(top)) for top in tops if top)
    goal = round(start + _GAIN * (top - start), 2)
    if goal <= start:
        return Target(None, "no group gained accuracy, so there is none to reach")
    return Target(
        goal, f"{_GAIN:.0%} of the way from the start ({start:.3f}) to the best of the best group ({top:.3f})"
    )


def by_seed(found: Sequence[Outcome], group: int) -> list[Mapping[str, float | None]]:
    """The same numbers, one mapping for each run of a group."""
    runs = len(found[0].values[group]) if found else 0
    return [{item.column.key: item.values[group][run] for item in found} for run in range(runs)]


def _accuracy(run: Run, moment: Literal["before", "after"]) -> float | None:
    found = accuracy_of(run)
    return None if found is None else getattr(found, moment)


def _best(run: Run) -> float | None:
    found = accuracy_of(run)
    return float(found.values.max()) if found and len(found.values) else None


def _reached(run: Run, goal: float) -> float | None:
    """The first step measured at `goal` or above."""
    found = accuracy_of(run)
    if found is None or not (found.values >= goal).any():
        return None
    return float(found.steps[found.values >= goal][0])


def _seconds_to(run: Run, goal: float) -> float | None:
    reached = _reached(run, goal)
    steps, seconds = run.series("time/step")
    if reached is None or not len(steps):
        return None
    return float(seconds[steps <= reached].sum())


def _clipped(run: Run) -> float | None:
    _, shares = clipped(run)
    return float(shares.mean()) if len(shares) else None


def _last(*keys: str) -> Pick:
    """Mean over the last tenth of the steps, at least one, of the first key the run logged."""

    def pick(run: Run) -> float | None:
        values = next((found for key in keys if len(found := run.series(key)[1])), ())
        return float(np.mean(values[-max(len(values) // 10, 1) :])) if len(values) else None

    return pick


def _over(key: str, reduce: Callable[[np.ndarray], np.floating]) -> Pick:
    def pick(run: Run) -> float | None:
        _, values = run.series(key)
        return float(reduce(values)) if len(values) else None

    return pick
