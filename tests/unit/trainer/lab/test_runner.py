"""Runs over worker processes: one that dies costs its run only, and is replaced."""

from __future__ import annotations

import os
import queue
import signal
from pathlib import Path

import pytest

from trimtab.runs.summary import RunSummary
from trimtab.trainer.config import load_config
from trimtab.trainer.lab import runner
from trimtab.trainer.processes import Message, Parent, WorkerProcess


class Steps(runner.ExperimentObserver):
    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def progress(self, name: str, step: int) -> None:
        self.seen.append((name, step))


@pytest.mark.e2e
def test_a_worker_that_dies_costs_its_run_and_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr(runner, "_start_process", lambda: WorkerProcess(__name__))
    cells = {str(seed): load_config("laboratory", [f"seed={seed}", f"out={tmp_path / str(seed)}"]) for seed in range(3)}
    observer = Steps()
    results = runner.run_cells(cells, workers=1, observer=observer)
    assert [result.status for result in results.values()] == ["done", "failed", "done"]
    assert results["1"].error == "its process was killed (by hand, or because memory ran out)"
    assert observer.seen == [(name, step) for name in cells for step in (1, 2)]


def work() -> None:
    """In the place of `trainer/lab/worker.py`: two steps a run; seed 1 is killed after them."""
    jobs: queue.SimpleQueue[Message] = queue.SimpleQueue()
    parent = Parent(jobs.put)
    while True:
        config, _, _ = jobs.get().content
        for step in (1, 2):
            parent.send(step)
        if config.seed == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        parent.send(RunSummary("done", ""))


if __name__ == "__main__":
    work()
