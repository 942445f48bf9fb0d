"""Events of a run on a cluster reach observers in other processes: each once, in order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from trimtab.trainer.cluster.driver import EventBuffer, replay_events
from trimtab.trainer.config import load_config
from trimtab.trainer.observer import NullObserver

CONFIG = load_config("laboratory")


class Recorder(NullObserver):
    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def started(self, config: Any, equation: str, total_steps: int, run: Path) -> None:
        self.seen.append(("started", config, equation, total_steps, run))

    def phase(self, name: str, done: int, total: int) -> None:
        self.seen.append(("phase", name, done, total))

    def step(self, metrics: Any) -> None:
        self.seen.append(("step", metrics))

    def evaluated(self, task: str, moment: Any, value: float) -> None:
        self.seen.append(("evaluated", task, moment, value))

    def message(self, text: str) -> None:
        self.seen.append(("message", text))


def test_events_arrive_in_order_with_only_the_newest_of_adjacent_phases() -> None:
    relay, watcher = EventBuffer(), Recorder()
    relay.started(CONFIG, "loss = 0", 3, Path("runs/x"))
    relay.phase("collect", 0, 3)
    relay.phase("update", 1, 2)
    relay.step({"step": np.int64(1), "loss": np.float32(0.5), "mismatch/anchor": "proximal"})
    relay.phase("collect", 1, 3)
    relay.evaluated("sort", "before", 0.25)
    relay.message("said")
    assert replay_events(relay.poll(0.0), watcher, CONFIG)
    assert watcher.seen == [
        ("started", CONFIG, "loss = 0", 3, Path("runs/x")),
        ("phase", "update", 1, 2),
        ("step", {"step": 1, "loss": 0.5, "mismatch/anchor": "proximal"}),
        ("phase", "collect", 1, 3),
        ("evaluated", "sort", "before", 0.25),
        ("message", "said"),
    ]
    assert not replay_events(relay.poll(0.0), watcher, CONFIG)
    assert len(watcher.seen) == 6
