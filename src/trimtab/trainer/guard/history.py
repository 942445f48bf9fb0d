"""The steps that led to the present policy: those of metrics.jsonl without the discarded ones."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from trimtab.monitor.alarms import COLLAPSED_SHARE, History, Step
from trimtab.monitor.collapse_signs import Evaluation, Sign, accuracy_falls, first_sign, needed_snapshots, trusted_step
from trimtab.monitor.scalars import steps_of
from trimtab.runs.returns import CONTINUES_FROM


class KeptSteps:
    """The steps of a run that were not discarded, as the rules of the monitor read them, and its evaluations.

    task: the trained task, whose held-out accuracy is read.
    """

    def __init__(self, task: str, rows: Iterable[Mapping[str, Any]] = (), lost: Collection[int] = ()) -> None:
        self._task = f"eval/{task}"
        self._steps: list[Step] = []
        self._evaluations: list[Evaluation] = []
        self._history = History()
        for row in rows:
            self.add(row)
        self.leave_out(lost)

    def add(self, row: Mapping[str, Any]) -> None:
        """Adds the metrics of a step."""
        if (start := row.get(CONTINUES_FROM)) is not None:
            self._steps = [step for step in self._steps if step.number <= start]
            self._evaluations = [one for one in self._evaluations if one.step <= start]
            self._history = History(self._steps)
        (step,) = steps_of([row])
        # As metrics.jsonl has them: a resumed run must judge the same.
        step = replace(step, metrics={name: value for name, value in step.metrics.items() if math.isfinite(value)})
        self._steps.append(step)
        self._history.add(step)
        before = row.get(f"{self._task}/before")
        for at, accuracy in ((0, before), (row["step"], row.get(f"{self._task}/greedy"))):
            # The first row repeats the accuracy before training, unless that step was evaluated itself.
            repeated = at > 0 and before is not None and accuracy == before
            if isinstance(accuracy, float) and math.isfinite(accuracy) and not repeated:
                self._evaluations.append(Evaluation(at, accuracy, row[f"{self._task}/problems"]))

    def leave_out(self, numbers: Collection[int]) -> None:
        """Leaves steps out whose sampler did not have the weights that its version says."""
        if numbers:
            self._steps = [step for step in self._steps if step.number not in numbers]
            self._history = History(self._steps)

    @property
    def numbers(self) -> list[int]:
        return [step.number for step in self._steps]

    def reward_is_low(self, count: int) -> bool:
        """Whether the mean reward of the last `count` steps is below half of the best mean of as many."""
        rewards = np.array([step["reward/mean"] for step in self._steps])
        means = sliding_window_view(rewards, count).mean(-1) if len(rewards) >= count else rewards[:0]
        return len(means) > 0 and bool(means[-1] < COLLAPSED_SHARE * np.nanmax(means))

    def sign(self, on: Collection[str]) -> Sign | None:
        """Returns the first sign of a collapse at the last step."""
        evaluated = bool(self._evaluations) and self._evaluations[-1].step == self._steps[-1].number
        fallen = accuracy_falls(self._evaluations) if evaluated and "reward" in on else None
        return fallen or first_sign(self._history.steps(), on)

    def needed(self, snapshots: Sequence[int], every: int) -> set[int]:
        """Returns the steps of those checkpoints that a return may need; see `needed_snapshots`."""
        trusted = trusted_step(self._steps)
        best = max(self._evaluations, key=lambda one: one.accuracy).step if self._evaluations else trusted
        return needed_snapshots(snapshots, trusted, best, every=every)
