"""Killed at any moment, a run continues as if nothing had happened: bit for bit, with the real loop and files."""

from __future__ import annotations

import math
import multiprocessing
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.run_results import tensors, untimed

from trimtab.runs.layout import METRICS, best_checkpoint
from trimtab.trainer.config import Config, load_config

pytestmark = pytest.mark.slow

# Everything that must survive a kill is in play: a sampler that lags, several updates per batch.
OVERRIDES = (
    "trainer.steps=24",
    "trainer.prompts=4",
    "trainer.samples=4",
    "trainer.minibatches=2",
    "trainer.sync_every=6",
    "trainer.dynamic_sampling=true",
    "checkpoint.every=2",
    "eval.problems=8",
    "eval.every=8",
    "eval.best=eval/sort/greedy",
    "log.trajectories_every=1",
)
KILLS = 6


def recipe() -> Config:
    config = load_config("quickstart-stale", OVERRIDES)
    return config.model_copy(update={"compare": None})


def train_in_child(out: str, resume: bool) -> None:
    from trimtab.trainer.run import train

    train(recipe(), out=out, resume=resume)


@pytest.fixture(scope="module")
def context() -> Any:
    # A fork server that has imported everything: a child starts in a moment and has no threads of its own to inherit.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["trimtab.trainer.run"])
    return context


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, context: Any) -> Path:
    out = tmp_path_factory.mktemp("runs") / "whole"
    child = context.Process(target=train_in_child, args=(str(out), False))
    child.start()
    child.join()
    assert child.exitcode == 0
    return out


def wait_for_steps(child: Any, out: Path, count: int, seconds: float) -> None:
    """Until the run has logged so many more, has ended, or the time is over. Going on shortens the file first."""
    least, end, seen = metrics_size(out), time.monotonic() + seconds, 0
    while child.exitcode is None and seen < count and time.monotonic() < end:
        child.join(timeout=0.02)
        logged = metrics_size(out)
        seen, least = (seen + (logged > least), logged) if logged >= least else (0, logged)


def metrics_size(out: Path) -> int:
    return (out / METRICS).stat().st_size if (out / METRICS).exists() else 0


def test_killed_at_many_random_moments_equals_uninterrupted(uninterrupted: Path, tmp_path: Path, context: Any) -> None:
    out, rng = tmp_path / "killed", random.Random(0)
    for kill in range(KILLS + 1):
        child = context.Process(target=train_in_child, args=(str(out), out.exists() and (out / "config.toml").exists()))
        child.start()
        if kill == KILLS:
            child.join()
            assert child.exitcode == 0
            break
        # Every other kill comes before or in the first steps, the others behind one, on a slow machine too.
        wait_for_steps(child, out, rng.randint(1, 3), seconds=math.inf if kill % 2 else rng.uniform(0.3, 2.0))
        time.sleep(rng.uniform(0.0, 0.05))
        assert child.exitcode is None, "there must be something to kill"
        child.kill()
        child.join()
    assert untimed(out) == untimed(uninterrupted)
    killed, whole = tensors(out), tensors(uninterrupted)
    assert killed.keys() == whole.keys()
    different = [name for name in whole if not torch.equal(killed[name], whole[name])]
    assert not different
    assert best_checkpoint(out / "checkpoints") == best_checkpoint(uninterrupted / "checkpoints")
    mine_files = sorted(path.name for path in (out / "trajectories").iterdir())
    assert mine_files == [f"step-{step:06d}.parquet" for step in range(1, 25)]
    for name in mine_files:
        assert (out / "trajectories" / name).read_bytes() == (uninterrupted / "trajectories" / name).read_bytes()


def test_staleness_and_groups_without_signal_really_occurred(uninterrupted: Path) -> None:
    rows = untimed(uninterrupted)
    assert len(rows) == 24
    assert max(row["lag/max"] for row in rows) >= 4
    assert any(row["groups/no_signal"] for row in rows)
    assert all(row["updates"] == 2 * row["step"] for row in rows)
