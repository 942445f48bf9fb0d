"""Whole runs on real vLLM: the laboratory, stopped and resumed, with the canary at every step; episodes with a tool."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.run_results import undocumented
from tests.support.vllm_support import needs_vllm

from trimtab.cli.doctor import vllm
from trimtab.runs.directory import read_metrics
from trimtab.trainer.config import load_config
from trimtab.trainer.observer import NullObserver
from trimtab.trainer.run import train

pytestmark = [pytest.mark.slow, needs_vllm]

SETS = ["engine.type=vllm", "engine.vllm.memory=0.05", "eval.problems=16", "eval.every=0", "checkpoint.every=2"]


def test_a_run_and_its_continuation_agree_with_the_trainer_at_every_step(tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(load_config("laboratory", [*SETS, "trainer.steps=4"]), out=out, observer=NullObserver())
    train(load_config("laboratory", [*SETS, "trainer.steps=6"]), out=out, observer=NullObserver(), resume=True)
    rows = read_metrics(out / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 7))
    for row in rows:
        # Both sides compute in float32: a weight that was not taken over would be seen at once.
        assert row["mismatch/k3"] < 1e-9
        assert row["policy_version"] == row["step"]
        assert row["canary/abs_diff"] < 1e-4
        assert not undocumented(row)
    assert rows[-1]["reward/mean"] > 0.2


def test_the_doctor_finds_this_vllm_sound() -> None:
    found = vllm()
    assert found.status == "ok"
    assert found.detail.endswith("works")
