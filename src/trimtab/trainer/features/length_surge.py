"""Detects a length surge: the step at which responses grow long, an early sign of growing mismatch.

Trainer and sampler drift apart as updates get noisier, and smaller updates limit the drift (arXiv 2602.01826). The
learning rate is lowered from the step of the surge on (`optim.surge_share`). Factor, window and baseline are choices of
a reproduction of that work; all of them, and the step itself, can be set in the recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trimtab.trainer.batching import MiniBatch
from trimtab.trainer.config import SurgeConfig
from trimtab.trainer.features.feature import Feature, PolicyLearner, StepRecord
from trimtab.trainer.optim import first_halving, surge_share


@dataclass
class LengthSurge(Feature):
    """Detector over the mean response length of each step, in tokens.

    A surge is detected when the mean of the last `window` steps exceeds `factor` times the mean of the first `baseline`
    steps. Steps without a sampled response do not count. `step` is the step of the surge (from 1), None before it.
    `notify` receives a message at that step.
    """

    config: SurgeConfig
    notify: Callable[[str], None]
    step: int | None = None
    baseline: list[float] = field(default_factory=list)
    recent: list[float] = field(default_factory=list)

    def observe(self, step: int, length: float | None) -> str | None:
        """Records the mean length of a finished step; returns a message if this is the step of the surge."""
        if self.step is not None:
            return None
        if self.config.at is not None:
            return self._set_step(step, "as optim.surge.at says") if step >= self.config.at else None
        if length is None:
            return None
        self.recent = [*self.recent, length][-self.config.window :]
        if len(self.baseline) < self.config.baseline:
            self.baseline.append(length)
            return None
        mean, baseline = sum(self.recent) / len(self.recent), sum(self.baseline) / len(self.baseline)
        if len(self.recent) < self.config.window or mean <= self.config.factor * baseline:
            return None
        why = (
            f"{mean:.4g} tokens a response over the last {len(self.recent)} steps, above {self.config.factor:g} times "
            f"the {baseline:.4g} of the first {len(self.baseline)}"
        )
        return self._set_step(step, why)

    def before_updates(self, learner: PolicyLearner, batches: Sequence[MiniBatch], step: int) -> None:
        learner.lr_factor = surge_share(self.config, step, self.step)

    def end_step(self, record: StepRecord) -> Mapping[str, float]:
        if message := self.observe(record.step, record.metrics.get("length/mean")):
            self.notify(message)
        return {} if self.step is None else {"optim/surge_step": self.step}

    def state(self) -> Mapping[str, Any]:
        """JSON keeps every bit of a float."""
        return {"surge": {"step": self.step, "baseline": self.baseline, "recent": self.recent}}

    def load_state(self, learner: PolicyLearner, saved: Mapping[str, Any]) -> None:
        state = saved["surge"]
        self.step, self.baseline, self.recent = state["step"], list(state["baseline"]), list(state["recent"])

    def _set_step(self, step: int, why: str) -> str:
        self.step = step
        return (
            f"length surge at step {step} ({why}): the learning rate halves every {self.config.period * step:g} steps, "
            f"first at step {first_halving(self.config, step)}, down to {self.config.floor:g} of it"
        )
