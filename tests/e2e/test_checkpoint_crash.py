"""SIGKILL while checkpoints are written: what is left is always complete, correct and not older than promised."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trimtab.runs import atomic
from trimtab.runs.layout import list_checkpoints
from trimtab.trainer.checkpoint import store

pytestmark = pytest.mark.slow

WRITER = Path(__file__).parents[1] / "programs" / "crash_writer.py"


class Writers:
    """Starts writers one after the other and knows what each has promised."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(WRITER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self.unread = b""

    def run(self, root: Path, first: int, *, same: bool = False, kill_at: int = 0, kill_after: float = 0.0) -> int:
        """One writer, from start to death; returns the last serial it reported as saved (0: none)."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{root} {first} {int(same)} {kill_at}\n".encode())
        promised, writer = 0, 0
        while True:
            words = self._line(kill_after if writer else None)
            if not words:
                os.kill(writer, signal.SIGKILL)
                kill_after = 0.0
            elif words[0] == "writer":
                writer = int(words[1])
            elif words[0] == "saved":
                promised = int(words[1])
                kill_after *= random.random()
            elif words[0] == "dead":
                return promised

    def _line(self, patience: float | None) -> list[str]:
        """The next line, or nothing once `patience` seconds (0 or None: any time) went by without one."""
        assert self.process.stdout is not None
        while b"\n" not in self.unread:
            if not select.select([self.process.stdout], [], [], patience or 60)[0]:
                assert patience, "the writer hangs"
                return []
            self.unread += os.read(self.process.stdout.fileno(), 4096)
        line, _, self.unread = self.unread.partition(b"\n")
        return line.decode().split()


@pytest.fixture(scope="module")
def writers() -> Iterator[Writers]:
    started = Writers()
    yield started
    assert started.process.stdin is not None
    started.process.stdin.close()
    assert started.process.wait(120) == 0


def check(root: Path, promised: int) -> int:
    """The newest checkpoint is whole and at least as new as promised; returns its serial number (0: there is none)."""
    for folder in list_checkpoints(root):
        store.load(folder)  # older ones, and those pruning was about to remove, are whole as well
    newest = store.latest(root)  # a skipped one would warn, and warnings are errors here
    if newest is None:
        assert promised == 0
        return 0
    serial = newest.meta["serial"]
    assert serial >= promised
    values = [tensor for section in newest.tensors.values() for tensor in section.values()]
    assert len(values) == 3
    assert all(bool((tensor == serial).all()) for tensor in values)
    return serial


def test_killed_at_random_moments(writers: Writers, tmp_path: Path) -> None:
    random.seed(0)
    serial, killed_inside, kills = 0, 0, 0
    while kills < 14 or killed_inside < 3:
        kills += 1
        assert kills < 300, "the kills missed the writing: this test showed nothing"
        promised = writers.run(tmp_path, serial + 1, kill_after=random.uniform(0.0005, 0.012))
        serial = check(tmp_path, max(serial, promised))
        killed_inside += any(item.name.startswith(atomic.TEMPORARY) for item in tmp_path.iterdir())
        atomic.remove_leftovers(tmp_path)
        assert not [item for item in tmp_path.iterdir() if not item.name.startswith("step-")]


@pytest.mark.parametrize("same", [False, True], ids=["next-step", "same-step"])
def test_killed_before_each_single_change_of_the_disk(writers: Writers, tmp_path: Path, same: bool) -> None:
    """Every window there is, between the two renames of a replacement too. Three saves make about 40 changes."""
    serial = 0
    for kill_at in range(1, 45):
        promised = writers.run(tmp_path, 1 if same else serial + 1, same=same, kill_at=kill_at)
        result = check(tmp_path, promised if same else max(serial, promised))
        serial = result if not same else 0
        atomic.remove_leftovers(tmp_path)
        assert check(tmp_path, promised) == result
        assert not [item for item in tmp_path.iterdir() if not item.name.startswith("step-")]
