"""Killed at any moment, a run continues as if nothing had happened: bit for bit, with the real loop and files."""

from __future__ import annotations

import multiprocessing
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.run_results import untimed

from trimtab.runs.layout import METRICS, best_checkpoint, list_checkpoints
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


def recipe() -> Config:
    config = load_config("quickstart-stale", OVERRIDES)
    return config.model_copy(update={"compare": None})


def train_in_child(out: str, resume: bool) -> None:
    from trimtab.trainer.run import train

    train(recipe(), out=out, resume=resume)


def final_tensors(run: Path) -> dict[str, torch.Tensor]:
    folder = list_checkpoints(run / "checkpoints")[-1]
    return {
        f"{path.stem}/{name}": tensor
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


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


def wait_for_a_step(child: Any, out: Path) -> None:
    """Until the run has logged one more, or has ended. Going on from a checkpoint shortens the file first."""
    least = logged = metrics_size(out)
    while child.exitcode is None and logged <= least:
        least = min(least, logged)
        child.join(timeout=0.02)
        logged = metrics_size(out)


def metrics_size(out: Path) -> int:
    return (out / METRICS).stat().st_size if (out / METRICS).exists() else 0


def test_killed_at_many_random_moments_equals_uninterrupted(uninterrupted: Path, tmp_path: Path, context: Any) -> None:
    out, rng, kills = tmp_path / "killed", random.Random(0), 0
    while True:
        child = context.Process(target=train_in_child, args=(str(out), out.exists() and (out / "config.toml").exists()))
        child.start()
        child.join(timeout=rng.uniform(0.3, 2.5) if kills < 12 else None)
        if kills % 2 and kills < 12:
            wait_for_a_step(child, out)  # on a slow machine too, every other kill falls behind one
        if child.exitcode is not None:
            assert child.exitcode == 0
            if kills >= 10:
                break
            # Finished too early to be killed often enough: forget the second half and go on from there.
            forget_second_half(out)
            continue
        child.kill()
        child.join()
        kills += 1
    assert kills >= 10
    assert untimed(out) == untimed(uninterrupted)
    killed, whole = final_tensors(out), final_tensors(uninterrupted)
    assert killed.keys() == whole.keys()
    different = [name for name in whole if not torch.equal(killed[name], whole[name])]
    assert not different
    assert best_checkpoint(out / "checkpoints") == best_checkpoint(uninterrupted / "checkpoints")
    mine_files = sorted(path.name for path in (out / "trajectories").iterdir())
    assert mine_files == [f"step-{step:06d}.parquet" for step in range(1, 25)]
    for name in mine_files:
        assert (out / "trajectories" / name).read_bytes() == (uninterrupted / "trajectories" / name).read_bytes()


def forget_second_half(out: Path) -> None:
    for folder in list_checkpoints(out / "checkpoints")[1:]:
        (folder / "manifest.json").unlink()


def test_staleness_and_groups_without_signal_really_occurred(uninterrupted: Path) -> None:
    rows = untimed(uninterrupted)
    assert len(rows) == 24
    assert max(row["lag/max"] for row in rows) >= 4
    assert any(row["groups/no_signal"] for row in rows)
    assert all(row["updates"] == 2 * row["step"] for row in rows)
