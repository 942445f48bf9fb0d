"""Detects a length surge: the step at which responses grow long, an early sign of growing mismatch.

Trainer and sampler drift apart as updates get noisy, and smaller updates hold the drift (arXiv 2602.01826); the surge
of the mean response length says when to begin. Factor, window and baseline are choices of a reproduction of that work,
so all of them, and the step itself, can be set. The rate that follows is `optim.surge_share`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trimtab.config import SurgeConfig
from trimtab.training.optim import first_halving


@dataclass
class LengthSurge:
    """Watches mean response lengths, in tokens, one a step. `step` is the step of the surge (from 1), None until then.

    Detected: the mean of the last `window` steps exceeds `factor` times the mean of the first `baseline` ones. A single
    long step moves that mean by a `window`-th of its length only. Steps without a response of the policy do not count.
    """

    config: SurgeConfig
    step: int | None = None
    baseline: list[float] = field(default_factory=list)
    recent: list[float] = field(default_factory=list)

    def observe(self, step: int, length: float | None) -> str | None:
        """Take the length of a finished step; a line for people if this is the step of the surge."""
        if self.step is not None:
            return None
        if self.config.at is not None:
            return self._found(step, "as optim.surge.at says") if step >= self.config.at else None
        if length is None:
            return None
        self.recent = [*self.recent, length][-self.config.window :]
        if len(self.baseline) < self.config.baseline:
            self.baseline.append(length)
            return None
        mean, before = sum(self.recent) / len(self.recent), sum(self.baseline) / len(self.baseline)
        if len(self.recent) < self.config.window or mean <= self.config.factor * before:
            return None
        why = (
            f"{mean:.4g} tokens a response over the last {len(self.recent)} steps, above {self.config.factor:g} times "
            f"the {before:.4g} of the first {len(self.baseline)}"
        )
        return self._found(step, why)

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold: JSON keeps every bit of a float."""
        return {"step": self.step, "baseline": self.baseline, "recent": self.recent}

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`."""
        self.step, self.baseline, self.recent = state["step"], list(state["baseline"]), list(state["recent"])

    def _found(self, step: int, why: str) -> str:
        self.step = step
        return (
            f"length surge at step {step} ({why}): the learning rate halves every {self.config.period * step:g} steps, "
            f"first at step {first_halving(self.config, step)}, down to {self.config.floor:g} of it"
        )
