"""Runs over worker processes: one that dies costs its run only, and is replaced."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trimtab.trainer.config import load_config
from trimtab.trainer.lab import runner
from trimtab.trainer.processes import WorkerProcess


class Steps(runner.ExperimentObserver):
    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def progress(self, name: str, step: int) -> None:
        self.seen.append((name, step))


@pytest.mark.e2e
def test_a_worker_that_dies_costs_its_run_and_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr(runner, "_start_process", lambda: WorkerProcess("tests.support.two_step_worker"))
    cells = {str(seed): load_config("laboratory", [f"seed={seed}", f"out={tmp_path / str(seed)}"]) for seed in range(3)}
    observer = Steps()
    results = runner.run_cells(cells, workers=1, observer=observer)
    assert [result.status for result in results.values()] == ["done", "failed", "done"]
    assert results["1"].error == "its process was killed (by hand, or because memory ran out)"
    assert observer.seen == [(name, step) for name in cells for step in (1, 2)]
