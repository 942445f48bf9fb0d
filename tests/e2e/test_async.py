"""Asynchronous generation with the real loop, real engine processes and real kills, on the laboratory model."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.support.processes import words
from tests.support.run_results import undocumented

from trimtab.runs import trajectories
from trimtab.runs.directory import read_metrics
from trimtab.runs.layout import list_checkpoints
from trimtab.trainer.checkpoint import store
from trimtab.trainer.config import Config, load_config
from trimtab.trainer.run import train

pytestmark = pytest.mark.e2e

STEPS, PROMPTS, LAG = 16, 4, 4
SMALL = (
    f"trainer.prompts={PROMPTS}",
    "trainer.samples=4",
    f"trainer.max_lag={LAG}",
    "eval.problems=4",
    "eval.every=0",
    "checkpoint.every=2",
    "log.trajectories_every=1",
)


def recipe(*overrides: str) -> Config:
    return load_config("laboratory", (f"trainer.steps={STEPS}", *SMALL, *overrides))


def consumed(out: Path) -> list[list[int]]:
    """The groups of every step, from its trajectory file, which also shows that no token was too old."""
    rows = read_metrics(out / "metrics.jsonl")
    result = []
    for row in rows:
        read = trajectories.read(out / "trajectories" / f"step-{row['step']:06d}.parquet")
        start = [one.proximal_version for one in read]
        for one in read:
            assert one.proximal_version is not None
            completion = one.trajectory.completion
            ages = one.proximal_version - completion.policy_version[completion.sampled]
            assert ((ages >= 0) & (ages <= LAG)).all(), (row["step"], ages)
        assert len(set(start)) == 1
        result.append(sorted({one.trajectory.group for one in read}))
    return result


def in_order(steps: int) -> list[list[int]]:
    return [list(range(step * PROMPTS, (step + 1) * PROMPTS)) for step in range(steps)]


@pytest.mark.slow
def test_a_run_with_two_engines(tmp_path: Path) -> None:
    """Evaluations pause generation; the canary checks both engines."""
    overrides = (
        "engine.workers=2",
        "trainer.steps=6",
        "trainer.minibatches=2",
        "eval.every=3",
        "engine.canary.every=1",
    )
    train(recipe(*overrides), out=tmp_path / "run")
    rows, groups = read_metrics(tmp_path / "run" / "metrics.jsonl"), consumed(tmp_path / "run")
    assert undocumented(key for row in rows for key in row) == []
    assert [row["updates"] for row in rows] == [2 * step for step in range(1, 7)]
    assert max(row["lag/max"] for row in rows) <= LAG
    for row in rows:
        assert sum(value for key, value in row.items() if key.startswith("lag/share/")) == pytest.approx(1.0)
    assert groups == in_order(6)
    assert max(row["mismatch/k3"] for row in rows) < 0.2
    assert [row["step"] for row in rows if "eval/sort/greedy" in row] == [1, 3, 6]


def train_in_child(out: str, resume: bool) -> None:
    train(recipe("engine.workers=2"), out=out, resume=resume)


def engines_of(trainer: int) -> list[psutil.Process]:
    try:
        children = psutil.Process(trainer).children()
    except psutil.NoSuchProcess:
        return []
    return [
        child
        for child in children
        if any("trimtab.trainer.engines.remote.engine_host" in word for word in words(child))
    ]


@pytest.mark.slow
def test_killed_trainers_and_engines_lose_nothing_and_use_nothing_twice(tmp_path: Path) -> None:
    """Engines and trainers die at random moments between checkpoints; every group is in exactly one batch."""
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["trimtab.trainer.run"])
    out, chance, killed = tmp_path / "run", random.Random(1), {"engine": 0, "trainer": 0}
    while True:
        child = context.Process(target=train_in_child, args=(str(out), (out / "config.toml").exists()))
        child.start()
        assert child.pid is not None
        known = len(list_checkpoints(out / "checkpoints"))
        while child.is_alive() and killed["trainer"] < 2:
            child.join(timeout=chance.uniform(0.1, 0.6))
            engines = engines_of(child.pid)
            if known == len(list_checkpoints(out / "checkpoints")) or not engines:
                continue
            known = len(list_checkpoints(out / "checkpoints"))
            if killed["engine"] < 3 and chance.random() < 0.6:
                os.kill(chance.choice(engines).pid, signal.SIGKILL)
                killed["engine"] += 1
            else:
                child.kill()
                killed["trainer"] += 1
        child.join()
        if child.exitcode == 0:
            break
        assert child.exitcode == -signal.SIGKILL
    assert killed["trainer"] + killed["engine"] > 0
    assert consumed(out) == in_order(STEPS)
    state = store.load(list_checkpoints(out / "checkpoints")[-1]).meta["source"]
    assert (state["consumed"], state["drawn"]) == (STEPS * PROMPTS, STEPS * PROMPTS)
    assert not state["unfinished"]
