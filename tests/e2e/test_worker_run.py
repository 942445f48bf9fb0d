"""An engine in a process of its own changes no number of a run, even if it is killed or stops responding."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tests.support.processes import words
from tests.support.run_results import untimed

from trimtab.trainer.config import load_config
from trimtab.trainer.observer import NullObserver
from trimtab.trainer.run import train

pytestmark = pytest.mark.slow

ENGINE = "trimtab.trainer.engines.remote.engine_host"
# What is measured of lanes only.
APART = ("engine/", "lag/share", "lag/length")


class Killer(NullObserver):
    """Kills the engine's process before the second batch, and stops its successor before the third."""

    def __init__(self) -> None:
        self.signals, self.messages = [signal.SIGSTOP, signal.SIGKILL], []

    def phase(self, name: str, done: int, total: int) -> None:  # noqa: ARG002
        if name == "collect" and done:
            for child in psutil.Process().children():
                if ENGINE in words(child):
                    os.kill(child.pid, self.signals.pop())

    def message(self, text: str) -> None:
        self.messages.append(text)


def numbers(out: Path, workers: int, observer: NullObserver | None = None) -> list[dict[str, Any]]:
    overrides = [f"engine.workers={workers}", "trainer.steps=3", "trainer.prompts=4", "trainer.samples=4"]
    overrides += ["engine.hang_timeout=8"] * workers
    config = load_config("laboratory", [*overrides, "eval.problems=16", "checkpoint.every=0"])
    train(config, out=out, observer=observer)
    return untimed(out, *APART)


def test_workers_change_no_number_and_neither_does_a_kill(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    plain = numbers(tmp_path / "here", workers=0)
    assert len(plain) == 3
    assert numbers(tmp_path / "apart", workers=1) == plain
    killer = Killer()
    assert numbers(tmp_path / "killed", workers=1, observer=killer) == plain
    assert not killer.signals
    assert any("was killed" in line for line in killer.messages)
    assert any("gave no sign of life for 8 s" in line for line in killer.messages)
    assert not [child for child in psutil.Process().children() if ENGINE in words(child)]
