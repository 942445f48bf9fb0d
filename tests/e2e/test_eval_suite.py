"""`trimtab eval` with the laboratory model: checkpoints of a run, and relay sampling."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.support import forked

from trimtab.runs.directory import read_metrics
from trimtab.trainer.config import load_config
from trimtab.trainer.evaluation import Settings, compare
from trimtab.trainer.run import train
from trimtab.trainer.sft import laboratory_folder

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


def test_relaying_by_a_run_says_which_helps(trimtab: Command, trained: Path, tmp_path: Path) -> None:
    """A checkpoint that begins worse answers than the model must cost accuracy, and the table must say so."""
    words = ["--task", "sort", "--problems", "32", "--samples", "16", "--dtype", "float32", "--json"]
    done = trimtab("eval", "laboratory", *words, "--relay", f"{trained}/checkpoints/step-000003", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    result = {item["mode"]: item for item in data["results"]}
    [gains] = data["relay"]
    assert gains["task"] == "sort"
    for k, gain in gains["difference"].items():
        assert gain["value"] == pytest.approx(result["relay"]["pass"][k] - result["sampled"]["pass"][k], abs=1e-12)
        assert gain["low"] <= gain["value"] <= gain["high"]
    assert list(gains["difference"]) == ["1", "2", "4", "8", "16"]


def test_a_model_that_relays_itself_samples_as_it_does_alone() -> None:
    """Sorted lists are all equally long, so the cut tells nothing and both are draws from one distribution."""
    folder = str(laboratory_folder())
    settings = Settings(samples=64, problems=96, dtype="float32")
    results = compare([folder], ["sort"], settings, relay=folder)
    alone, relay = (results.measured[folder, "sort", mode] for mode in ("sampled", "relay"))
    assert 4.5 < relay.prefix <= 5
    assert 0.2 < alone.accuracy < 0.6
    assert [problem.correct for problem in alone.problems] != [problem.correct for problem in relay.problems]
    # Of two draws from one distribution the difference d of a problem is symmetric about 0. By Hoeffding's inequality
    # the sum over problems exceeds sqrt(2 ln(2 / a) sum d^2) with probability a at most, here 1e-5: .04 of accuracy.
    # Another rounding trains another model and draws other samples, so nothing tighter could hold on every machine.
    pairs = zip(relay.problems, alone.problems, strict=True)
    differences = np.array([one.correct - other.correct for one, other in pairs]) / 64
    chance = float(np.sqrt(2 * np.log(2 / 1e-5) * (differences**2).sum())) / 96
    # A list that stops early is cut before its fifth token: so many samples, at most, follow another distribution.
    early = 5 - relay.prefix
    assert abs(relay.accuracy - alone.accuracy) < chance + early  # measured .006 to .010 of .06 to .07, four seeds
    assert chance + early < 0.1, "a relay that begins wrong costs all of the accuracy"
    gain = results.gains(folder)[1]
    assert gain.value == pytest.approx(differences.mean(), abs=1e-12)
    assert gain.low < gain.value < gain.high
