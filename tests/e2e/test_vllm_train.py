"""A whole run on real vLLM: the laboratory, by its command, stopped and resumed, with the canary at every step."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.vllm_support import needs_vllm

from trimtab.cli.doctor_vllm import diagnose
from trimtab.runs.directory import read_metrics
from trimtab.runs.metric_catalog import undocumented

pytestmark = [pytest.mark.slow, needs_vllm]

SETS = ["engine.type=vllm", "engine.vllm.memory=0.05", "eval.problems=16", "eval.every=0", "checkpoint.every=2"]


def train(out: Path, *more: str) -> str:
    command = [sys.executable, "-m", "trimtab", "train", "laboratory", "--out", str(out), *more]
    command += [word for item in SETS for word in ("--set", item)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_a_run_and_its_continuation_agree_with_the_trainer_at_every_step(tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(out, "--set", "trainer.steps=4")
    train(out, "--resume", "--set", "trainer.steps=6")
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
    found = diagnose()
    assert found.advice == ""
    assert found.value.endswith("works")
