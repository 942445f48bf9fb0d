"""Judges each metric of a run against its healthy range over all steps.

A run is divided into up to four phases of at least five steps. A metric is outside its range if more than half of the
steps of some phase are, so that single steps do not decide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from trimtab.runs.metric_catalog import judge, metric
from trimtab.runs.reader import Run

State = Literal["healthy", "at times", "outside"]
MAX_PHASES, MIN_PHASE_STEPS = 4, 5


@dataclass(frozen=True)
class Phase:
    """Consecutive measurements of one metric from step `first` to `last`, `outside` of them outside its range."""

    first: int
    last: int
    outside: int
    measured: int
    median: float

    @property
    def share(self) -> float:
        return self.outside / self.measured

    def __str__(self) -> str:
        return f"{self.first} to {self.last}"


@dataclass(frozen=True)
class JudgedMetric:
    """One metric over the run.

    worst: the phase with the largest share of steps outside; among equals the one whose median is furthest out.
    """

    key: str
    state: State
    outside: int
    measured: int
    median: float
    worst: Phase

    @property
    def steps(self) -> str:
        """Text such as `62 of 80 steps, mostly 61 to 80`; empty if no step is outside."""
        if not self.outside:
            return ""
        where = f", mostly {self.worst}" if self.outside < self.measured > self.worst.measured else ""
        return f"{self.outside} of {self.measured} steps{where}"

    @property
    def shown(self) -> float:
        """The median over the worst phase where any step is outside, otherwise over the run."""
        return self.worst.median if self.outside else self.median


def judge_metric(run: Run, key: str) -> JudgedMetric | None:
    """Returns the metric `key` judged; None if it has no range or was not measured."""
    steps, values = _judged_series(run, key)
    states = [judge(key, value) for value in values.tolist()]
    if not any(states):
        return None
    outside = np.array([state == "outside" for state in states])
    phases = [
        Phase(int(steps[part[0]]), int(steps[part[-1]]), int(outside[part].sum()), len(part), _median(values[part]))
        for part in equal_parts(len(values))
    ]
    worst = max(phases, key=lambda part: (part.share, _excess(key, part.median)))
    state: State = "healthy" if not outside.any() else "outside" if worst.share > 0.5 else "at times"
    return JudgedMetric(key, state, int(outside.sum()), len(values), _median(values), worst)


def _judged_series(run: Run, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns steps and values that the range of `key` applies to: the metric, or its share of another metric."""
    row = metric(key)
    if row is None or not row.of:
        return run.series(key)
    measured = [(step["step"], step[key], step.get(row.of)) for step in run.rows if step.get(key) is not None]
    pairs = [(step, part / whole) for step, part, whole in measured if whole]
    steps, values = zip(*pairs, strict=True) if pairs else ((), ())
    return np.array(steps, dtype=np.float64), np.array(values, dtype=np.float64)


def _excess(key: str, value: float) -> float:
    row = metric(key)
    assert row is not None
    low, high = (-math.inf if row.low is None else row.low), (math.inf if row.high is None else row.high)
    return max(value - high, low - value, 0.0)


def _median(values: np.ndarray) -> float:
    return float(np.median(values))


def equal_parts(count: int) -> list[np.ndarray]:
    """Returns the indices of up to four equal parts of a run, each of at least five steps."""
    return np.array_split(np.arange(count), min(MAX_PHASES, max(count // MIN_PHASE_STEPS, 1)))
