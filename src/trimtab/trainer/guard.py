"""`[guard]`: judges each step of a run; `guard_actions` does what follows from a sign of a collapse.

Decisions depend on metrics.jsonl and the checkpoint alone, so a run that is killed, even in a return, repeats them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from trimtab.errors import DivergedError, TrimtabError
from trimtab.monitor.alarms import COLLAPSED_SHARE, SHIFT_STEPS, WINDOW, History, Step
from trimtab.monitor.collapse_signs import Evaluation, Sign, accuracy_falls, first_sign, needed_snapshots, trusted_step
from trimtab.monitor.scalars import steps_of
from trimtab.runs.directory import RunDirectory
from trimtab.runs.layout import checkpoint_step
from trimtab.runs.reader import CONTINUES_FROM, EVENT, RETURNS
from trimtab.trainer.config import Config
from trimtab.trainer.learner import Learner
from trimtab.trainer.ranks import current_ranks

LOST = "undelivered"
"""Name of the rule that sees that the sampler does not have its newest weights."""


@dataclass
class GuardState:
    """The state of the guard in a checkpoint."""

    returns: int = 0  # number of returns so far
    decay_from: int | None = None  # updates of the first restored policy: the rate falls from there
    discarded: int = 0  # number of discarded steps so far
    lost: list[int] = field(default_factory=list)  # steps whose sampler did not have the newest weights
    marks: dict[str, Any] = field(default_factory=dict)  # metrics to add to the next step
    failed: list[Any] = field(default_factory=list)  # the sign of a failed step, until the run has returned


class Guard:
    """Detects a collapse of the run, and keeps the state of its returns; does nothing if `guard.on` is empty.

    All ranks make the same calls; the leader, which has the metrics, decides. task: name of the trained task, which the
    keys of its held-out accuracy contain.
    """

    def __init__(self, config: Config, task: str) -> None:
        self.config = config.guard
        self.is_on = bool(config.guard.on)
        self._task = task
        self._sync_every = config.trainer.sync_every or 1
        self._steps = KeptSteps(self._task)
        self.state = GuardState()

    @property
    def sync_every(self) -> int:
        """Updates between two publications of weights."""
        return max(1, self._sync_every >> self.state.returns)

    def read(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Reads the logged steps of a resumed run, in place of those read so far."""
        self._steps = KeptSteps(self._task, rows, self.state.lost)

    def take_metrics(self, republished: Sequence[str] = ()) -> dict[str, Any]:
        """Returns a step's guard metrics: returns so far, events. `republished`: why weights were published again."""
        for text in republished if self.is_on else ():
            self.log_event(text)
        metrics, self.state.marks = self.state.marks, {}
        return metrics | ({RETURNS: self.state.returns} if self.state.returns else {})

    def judge(self, metrics: Mapping[str, Any], idle: int = 0) -> Sign | None:
        """Adds the metrics of a step; returns the first sign of a collapse in the steps so far.

        idle: number of consecutive steps without a training signal, if they end a run without a guard; otherwise 0.
        """
        if not self.is_on:
            return None
        sign = None
        if current_ranks().is_leader:
            self._steps.add(metrics)
            sign = self._steps.sign(self.config.on)
            if sign is not None and sign.name == LOST:
                sign = self._if_lost_again(sign)
            if idle and (sign is None or sign.name == LOST):
                sign = self._no_signal(idle) or sign
        data = json.loads(current_ranks().broadcast(json.dumps(sign).encode()))
        return None if data is None else Sign(*data)

    def _if_lost_again(self, sign: Sign) -> Sign:
        """Turns a sign of lost weights into a reason to return, if the weights were published again without effect."""
        first, last = min(self.state.lost[-SHIFT_STEPS:], default=0), max(self.state.lost, default=-WINDOW)
        if self._steps.numbers[-1] - last > WINDOW:
            return sign
        healthy = max((number for number in self._steps.numbers if number < first), default=0)
        return sign._replace(name="publication", text=f"{sign.text}, and they were published again", healthy=healthy)

    def _no_signal(self, idle: int) -> Sign | None:
        """Returns a sign of a collapse if the last `idle` steps had no training signal and their reward is low."""
        if "reward" not in self.config.on or not self._steps.reward_is_low(idle):
            return None
        text = f"{idle} steps in a row had no training signal, and their reward is low"
        return Sign("reward", "no-signal", text, ([0] * idle + self._steps.numbers)[-1 - idle])

    def step_failed(self, error: DivergedError, step: int) -> None:
        """Records, also for a checkpoint of the failed step, that updates after `step` steps were not finite."""
        if "nonfinite" in self.config.on:
            self.state.failed = [*Sign("nonfinite", "nonfinite", str(error), step)]

    def needed_checkpoints(self, run: RunDirectory, step: int) -> set[int]:
        """Returns the steps whose checkpoints must not be deleted after `step`; only the leader deletes any."""
        return self._steps.needed([*self.checkpoint_steps(run), step], self.config.every) if self.is_on else set()

    def checkpoint_steps(self, run: RunDirectory) -> list[int]:
        """Returns the steps of all checkpoints, oldest first, without discarded steps."""
        counted = {0, *self._steps.numbers}
        saved = current_ranks().run_on_all_ranks(run.checkpoints)
        return [step for step in map(checkpoint_step, saved) if step in counted]

    def lower_rate(self, learner: Learner) -> None:
        """Sets the learning rate of a run that has returned: its factor, and the update from which it falls to 0."""
        learner.lr_factor, learner.decay_from = self.config.lr_factor**self.state.returns, self.state.decay_from

    def log_event(self, text: str) -> None:
        """Appends to the text of the event that the next step logs."""
        logged = self.state.marks.get(EVENT)
        self.state.marks[EVENT] = text if logged is None else f"{logged}; {text}"

    def leave_out_newest(self) -> None:
        """Removes the newest steps, whose sampler did not have the newest weights, from those that are judged."""
        if current_ranks().is_leader:
            self.state.lost += (lost := self._steps.numbers[-SHIFT_STEPS:])
            self._steps.leave_out(lost)

    def load(self, learner: Learner, saved: Mapping[str, Any]) -> None:
        """Restores `state` in a resumed run. Raises `TrimtabError` if the guard has returned before and is now off."""
        if self.is_on:
            self.state = GuardState(**saved)
            self.lower_rate(learner)
        elif saved.get("returns"):
            raise TrimtabError(
                f"the guard of this run has returned {saved['returns']} times, which changed its learning rate and its "
                "number of steps: resume it with guard.on"
            )


class KeptSteps:
    """The evaluations and the steps (without discarded ones) of a run, in the form that the monitor's rules read.

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
        # Finite values only, as in metrics.jsonl: a resumed run must judge the same.
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
        """Removes steps whose sampler did not have the weights of the version it reported."""
        if numbers:
            self._steps = [step for step in self._steps if step.number not in numbers]
            self._history = History(self._steps)

    @property
    def numbers(self) -> list[int]:
        return [step.number for step in self._steps]

    def reward_is_low(self, count: int) -> bool:
        """Whether the mean reward of the last `count` steps is below half of the highest mean of `count` steps."""
        rewards = np.array([step["reward/mean"] for step in self._steps])
        means = sliding_window_view(rewards, count).mean(-1) if len(rewards) >= count else rewards[:0]
        return len(means) > 0 and bool(means[-1] < COLLAPSED_SHARE * np.nanmax(means))

    def sign(self, on: Collection[str]) -> Sign | None:
        """Returns the first sign of a collapse at the last step."""
        evaluated = bool(self._evaluations) and self._evaluations[-1].step == self._steps[-1].number
        fallen = accuracy_falls(self._evaluations) if evaluated and "reward" in on else None
        return fallen or first_sign(self._history.steps(), on)

    def needed(self, checkpoints: Sequence[int], every: int) -> set[int]:
        """Returns the steps whose checkpoints a return may need; see `needed_snapshots`."""
        trusted = trusted_step(self._steps)
        best = max(self._evaluations, key=lambda one: one.accuracy).step if self._evaluations else trusted
        return needed_snapshots(checkpoints, trusted, best, every=every)
