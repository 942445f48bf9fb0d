"""`trimtab eval` with the laboratory model: checkpoints of a run."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support import forked

from trimtab.runs.directory import read_metrics
from trimtab.trainer.config import load_config
from trimtab.trainer.run import train

pytestmark = pytest.mark.slow
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def trimtab(python: forked.Run) -> Command:
    return lambda *words, cwd: python("-m", "trimtab", *words, cwd=cwd)


RECIPE = {
    "threads": 1,
    "model": {"path": "laboratory", "dtype": "float32", "autocast": "none"},
    "task": {"name": "sort"},
    "engine": {"dtype": "float32"},
    "optim": {"lr": 1e-3},
    "trainer": {"steps": 3, "prompts": 4, "samples": 4},
    "eval": {"problems": 48, "every": 1, "best": "eval/sort/greedy"},
    "checkpoint": {"every": 1, "keep": 3},
    "log": {"trajectories_every": 0},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose policy changes a lot from one checkpoint to the next."""
    return train(load_config(RECIPE), out=tmp_path_factory.mktemp("runs") / "run").run


def test_a_run_its_checkpoints_and_its_start_side_by_side(trimtab: Command, trained: Path, tmp_path: Path) -> None:
    steps = [f"{trained}/checkpoints/step-{step:06d}" for step in (1, 2, 3)]
    done = trimtab("eval", str(trained), *steps, "--problems", "48", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    actual = {item["model"]: item["accuracy"] for item in json.loads(done.stdout)["results"]}
    logged = {row["step"]: row["eval/sort/greedy"] for row in read_metrics(trained / "metrics.jsonl")}
    # The trainer's own measurements: same problems, same weights, greedy, float32.
    assert [actual[name] for name in steps] == [logged[1], logged[2], logged[3]]
    assert actual[str(trained)] == logged[3]
    assert len(set(logged.values())) > 1, "the checkpoints differ, so naming the wrong one would show"
    best = trimtab("eval", str(trained), "--which", "best", "--problems", "48", "--json", cwd=tmp_path)
    [result] = json.loads(best.stdout)["results"]
    assert (result["model"], result["accuracy"]) == (f"{trained} (best)", max(logged.values()))
    absent = trimtab("eval", f"{trained}/checkpoints/step-000009", cwd=tmp_path)
    assert (absent.returncode, len(absent.stderr.splitlines())) == (2, 1)
    assert "step-000009" in absent.stderr
