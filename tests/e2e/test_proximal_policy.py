"""`trainer.proximal` in whole runs: what is mismatch and what is staleness, and that a resumed run is the same."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import forked
from tests.support.run_results import tensors, untimed, weights
from torch import nn

from trimtab.errors import TrimtabWarning
from trimtab.runs import trajectories
from trimtab.runs.layout import list_checkpoints
from trimtab.trainer.config import load_config
from trimtab.trainer.features.proximal_policy import Snapshots
from trimtab.trainer.run import train

pytestmark = pytest.mark.e2e

SMALL = (
    *("trainer.prompts=4", "trainer.samples=4", "eval.problems=2", "eval.every=0", "log.trajectories_every=1"),
    *("optim.lr=1e-3", "optim.warmup=0", "diagnose.every=2"),
)
STALE = "trainer.sync_every=3"
SNAPSHOT = "trainer.proximal=snapshot"
ROUNDING = 1e-11  # k3 of float32 log-probs of two implementations; 3e-13 was seen


def run(out: Path, *overrides: str, steps: int = 6, resume: bool = False) -> list[dict[str, Any]]:
    train(load_config("laboratory", [*SMALL, f"trainer.steps={steps}", *overrides]), out=out, resume=resume)
    return untimed(out, "eval/")  # a run that ends earlier is evaluated earlier


def k3(rows: list[dict[str, Any]]) -> list[float]:
    """Of the steps with tokens of older weights."""
    return [row["mismatch/k3"] for row in rows if row["lag/max"]]


def test_a_snapshot_separates_the_mismatch_from_the_staleness(tmp_path: Path) -> None:
    rows = run(tmp_path / "snapshot", STALE, SNAPSHOT)
    assert [row["lag/max"] for row in rows] == [0, 1, 2] * 2
    assert max(k3(rows)) < ROUNDING
    assert all(abs(row["drift/mismatch_q95"]) < 1e-5 for row in rows)
    assert [row["drift/staleness_q05"] < -1e-3 for row in rows] == [False, True, True] * 2
    current = run(tmp_path / "current", STALE)
    assert min(k3(current)) > 1e-3
    assert [row["drift/staleness_q05"] for row in current] == [0.0] * 6
    # How far the updates of a step moved the policy is counted from the weights before them, as with "current".
    assert 0 < rows[3]["update/policy_kl"] < rows[2]["update/kl"]
    for step, version in ((4, 3), (6, 3)):
        read = trajectories.read(tmp_path / "snapshot" / "trajectories" / f"step-00000{step}.parquet")
        assert {row.proximal_version for row in read} == {version}, "the age of a token of its own policy is 0"


@pytest.mark.slow
@pytest.mark.parametrize("in_flight", ["finish", "continue"])
def test_asynchronous_generation(in_flight: str, tmp_path: Path) -> None:
    """With "continue" a response has tokens of several versions. A checkpoint has groups of older weights than its own,
    which are trained first when the run goes on. `dapo` reads no log-prob of the sampler."""
    overrides = (SNAPSHOT, "trainer.max_lag=4", "trainer.minibatches=2", f"trainer.in_flight={in_flight}")
    overrides += ("objective.name=dapo", "checkpoint.every=3", "checkpoint.keep=9")
    assert 0 < max(k3(run(tmp_path / "run", *overrides))) < ROUNDING
    shutil.rmtree(list_checkpoints(tmp_path / "run" / "checkpoints")[-1])
    assert 0 < max(k3(run(tmp_path / "run", *overrides, resume=True))) < ROUNDING


def test_a_snapshot_under_another_version_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def keep_the_first(self: Snapshots, model: nn.Module, version: int) -> Mapping[str, Any]:  # noqa: ARG001
        self._snapshots[version] = self._snapshots[0] if version else self._copy()  # pyright: ignore[reportPrivateUsage]
        return {}

    monkeypatch.setattr(Snapshots, "publish_options", keep_the_first)
    rows = run(tmp_path / "run", STALE, SNAPSHOT)
    assert max(k3(rows)[:2]) < ROUNDING, "the first publication is right"
    assert min(k3(rows)[2:]) > 1e-3


@pytest.mark.parametrize("minibatches", [1, 2])
def test_without_lag_it_is_the_current_policy_bit_for_bit(minibatches: int, tmp_path: Path) -> None:
    overrides = [f"trainer.minibatches={minibatches}", "engine.workers=0", "trainer.max_lag=0"]
    plain = run(tmp_path / "plain", *overrides, steps=3)
    with pytest.warns(TrimtabWarning, match="trainer.proximal has no effect without tokens of older weights"):
        assert run(tmp_path / "other", *overrides, SNAPSHOT, steps=3) == plain
    mine, its = weights(tmp_path / "other"), weights(tmp_path / "plain")
    assert all(torch.equal(mine[name], its[name]) for name in its)


@pytest.mark.parametrize("lora", [0, 4])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(lora: int, tmp_path: Path) -> None:
    """Resumed between two publications: the next batch is of the weights before the checkpoint's."""
    overrides = (STALE, SNAPSHOT, f"model.lora.rank={lora}")
    torch.manual_seed(0)  # adapters begin with random numbers
    whole = run(tmp_path / "whole", *overrides)
    torch.manual_seed(0)
    run(tmp_path / "parts", *overrides, steps=4)
    assert run(tmp_path / "parts", *overrides, resume=True) == whole
    mine, its = tensors(tmp_path / "parts"), tensors(tmp_path / "whole")
    assert mine.keys() == its.keys()
    assert [name for name in its if not torch.equal(mine[name], its[name])] == []
    assert all((".lora_" in name) == bool(lora) for name in its if name.startswith("optimizer/") and "exp_avg" in name)
    kept = {name.partition("/")[0]: name for name in its if name.startswith("proximal")}
    assert sorted(kept) == ["proximal-6"]
    assert all((".lora_" in name) == bool(lora) for name in kept.values())
    assert all(row["drift/staleness_q05"] < 0 for row in whole if row["lag/max"])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_score_as_one_does(python: forked.Run, tmp_path: Path) -> None:
    """Micro-batches of several versions or of none of them on a rank; copies are sharded, also in a checkpoint."""
    sets = (STALE, SNAPSHOT, "trainer.minibatches=2", "trainer.micro_batch_tokens=100", "trainer.steps=4")
    sets += ("checkpoint.every=2",)
    alone = run(tmp_path / "one", *sets, steps=4)
    command = ["-m", "trimtab", "train", "laboratory", "--out", str(tmp_path / "two")]
    command += [f"--set={key}" for key in (*SMALL, *sets)]
    assert python(*command, ranks=2).returncode == 0
    both = untimed(tmp_path / "two", "eval/")
    for mine, its in zip(both, alone, strict=True):
        for key in ("mismatch/k3", "drift/staleness_q05", "optim/grad_norm", "lag/max"):
            assert mine[key] == pytest.approx(its[key], rel=1e-3, abs=ROUNDING), (mine["step"], key)
    shutil.rmtree(list_checkpoints(tmp_path / "two" / "checkpoints")[-1])
    assert python(*command, "--resume", ranks=2).returncode == 0
    assert untimed(tmp_path / "two", "eval/") == both
