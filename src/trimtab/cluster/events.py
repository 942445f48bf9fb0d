"""Observer calls of a remote run, buffered until the driver polls them."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trimtab.config import Config
from trimtab.training.observer import Moment, Observer


class Relay:
    """The observer of the run.

    Of the phases only the newest is kept: they are the hand of a clock, everything else is a record.
    """

    def __init__(self) -> None:
        self._news: list[list[Any]] = []
        self._changed = threading.Condition()

    def started(self, config: Config, equation: str, total_steps: int, run: Path) -> None:  # noqa: ARG002
        self._tell("started", equation, total_steps, str(run))

    def phase(self, name: str, done: int, total: int) -> None:
        self._tell("phase", name, done, total)

    def step(self, metrics: Mapping[str, float | str]) -> None:
        self._tell("step", dict(metrics))

    def evaluated(self, task: str, moment: Moment, value: float) -> None:
        self._tell("evaluated", task, moment, value)

    def message(self, text: str) -> None:
        self._tell("message", text)

    def finished(self, summary: Mapping[str, float | str], report: Path | None) -> None:
        """The run itself does not finish a display; the process that writes the report does."""

    def take(self, patience: float) -> str:
        """Everything that happened since the last call, as JSON for `replay`; waits `patience` seconds for any."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._news), patience)
            news, self._news = self._news, []
        return json.dumps(news, default=lambda number: number.item())  # numpy's scalars

    def _tell(self, *event: Any) -> None:
        with self._changed:
            if event[0] == "phase" and self._news and self._news[-1][0] == "phase":
                self._news.pop()
            self._news.append(list(event))
            self._changed.notify_all()


def replay(news: str, observer: Observer, config: Config) -> bool:
    """Tell `observer` what a relay took, in its order; returns whether the run started among it."""
    events = json.loads(news)
    for name, *arguments in events:
        if name == "started":
            equation, total, run = arguments
            observer.started(config, equation, total, Path(run))
        else:
            getattr(observer, name)(*arguments)
    return any(name == "started" for name, *_ in events)
