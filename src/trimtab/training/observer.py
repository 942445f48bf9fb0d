"""Progress callbacks. Training calls them and never imports a display."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Protocol

from trimtab.config import Config

Moment = Literal["before", "after"] | int


class Observer(Protocol):
    """A live view of a run. Calls come from one thread, in the order of events; none may change the run.

    A comparison (`[compare]`) uses the same protocol: `phase("runs", done, total)`, `message` and `finished`.
    """

    def started(self, config: Config, equation: str, total_steps: int, run: Path) -> None:
        """Once, before the first step: the resolved recipe, its resolved equation and the run directory."""
        ...

    def phase(self, name: str, done: int, total: int) -> None:
        """Progress inside a step or before it: `name` is "collect", "score", "update", "evaluate", ...; 0: no total."""
        ...

    def step(self, metrics: Mapping[str, float | str]) -> None:
        """One finished step: exactly the object written to metrics.jsonl."""
        ...

    def evaluated(self, task: str, moment: Moment, value: float) -> None:
        """Held-out greedy accuracy in [0, 1], before training, after it, or after step number `moment`."""
        ...

    def message(self, text: str) -> None:
        """One line for people: a checkpoint was written, a step was skipped, a previous checkpoint was used."""
        ...

    def finished(self, summary: Mapping[str, float | str], report: Path | None) -> None:
        """Once, at the end. `eval/<task>/before`, `/after` and `/problems` become one line, others stay as they are."""
        ...


class NullObserver:
    """The default observer: shows nothing."""

    def started(self, config: Config, equation: str, total_steps: int, run: Path) -> None:
        pass

    def phase(self, name: str, done: int, total: int) -> None:
        pass

    def step(self, metrics: Mapping[str, float | str]) -> None:
        pass

    def evaluated(self, task: str, moment: Moment, value: float) -> None:
        pass

    def message(self, text: str) -> None:
        pass

    def finished(self, summary: Mapping[str, float | str], report: Path | None) -> None:
        pass
