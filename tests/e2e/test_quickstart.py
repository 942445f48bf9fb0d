"""The first command a user runs: the real model and the real engine, for two steps, and until it is healthy."""

from __future__ import annotations

from pathlib import Path

import pytest

import trimtab
from trimtab.report.health import health
from trimtab.runs.reader import read_run
from trimtab.trainer.config import load_config
from trimtab.trainer.run import train

pytestmark = pytest.mark.e2e


def test_every_step_measures_the_engines_own_mismatch_and_diagnose_calls_it_by_its_name(tmp_path: Path) -> None:
    """Nothing is quantized there: bfloat16 sampling, which the run's own recipe says."""
    small = ["trainer.steps=2", "trainer.prompts=1", "trainer.samples=4", "eval.problems=2"]
    train(load_config("quickstart", small), out=tmp_path / "run")
    rows = read_run(tmp_path / "run").rows
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        # bfloat16 sampling against a float32 master under bfloat16 autocast: never exactly 0, never large.
        assert 1e-5 < row["mismatch/k3"] < 2e-2
        assert row["mismatch/ess_token"] > 0.9
        assert row["mismatch/anchor"] == "proximal"
    assert 0.0 <= rows[0]["eval/arithmetic/before"] <= 1.0
    assert "eval/arithmetic/greedy" in rows[-1]
    diagnosis = trimtab.diagnose(tmp_path / "run")
    assert {cause.name for cause in diagnosis.causes} <= {"precision"}
    assert diagnosis.measured.origin.numerics is not None
    assert diagnosis.measured.origin.numerics.coarse == ()


@pytest.mark.slow
def test_it_is_healthy(tmp_path: Path) -> None:
    """A small model in bfloat16: certain of most tokens, it has a correlation down to 0.97 in single steps."""
    train(
        load_config("quickstart", ["trainer.steps=24", "eval.problems=64", "checkpoint.every=0"]), out=tmp_path / "run"
    )
    run = read_run(tmp_path / "run")
    result = health(run)
    assert result.state == "healthy", result.text
    assert result.text.startswith("Better than before: ")
    accuracy = run.accuracy()["arithmetic"]
    assert accuracy.before is not None
    assert accuracy.after is not None
    assert accuracy.after > accuracy.before + 0.3
    assert not [key for row in run.rows for key, value in row.items() if value is None], "figures that are not finite"
