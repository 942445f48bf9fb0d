"""Progress callbacks of a run. Training imports no display."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Protocol

from trimtab.trainer.config import Config

Moment = Literal["before", "after"] | int


class Observer(Protocol):
    """Receives the progress of a run. All calls come from one thread, in order; none may change the run."""

    def started(self, config: Config, equation: str, total_steps: int, run: Path) -> None:
        """Called once before the first step, with the resolved recipe, its equation and the run directory."""

    def phase(self, name: str, done: int, total: int) -> None:
        """Called as ("collect", finished steps, all steps of the run) and ("update", done, all updates of the step)."""

    def step(self, metrics: Mapping[str, float | str]) -> None:
        """Called after each step with the object that was written to metrics.jsonl."""

    def evaluated(self, task: str, moment: Moment, value: float) -> None:
        """Greedy accuracy in [0, 1] on held-out problems before training, after it, or after step `moment`."""

    def message(self, text: str) -> None:
        """One line of text for the user."""

    def finished(self, summary: Mapping[str, float | str], report: Path | None) -> None:
        """Called once, at the end. Displays show `eval/<task>/before`, `/after` and `/problems` in one line."""


class NullObserver(Observer):
    """An observer that does nothing."""
