"""What the page of a real run says first: healthy runs, and runs with a fault each that was planted."""

from __future__ import annotations

from pathlib import Path

import pytest
from markupsafe import escape

from trimtab.report.health import health
from trimtab.report.run_report import write_report
from trimtab.runs.reader import read_run
from trimtab.trainer.config import load_config
from trimtab.trainer.lab.regimes import regime
from trimtab.trainer.run import train

pytestmark = pytest.mark.e2e
FEW = ("eval.problems=16", "eval.every=0", "log.trajectories_every=0")


def verdict(folder: Path, *changes: str) -> str:
    """Trains the laboratory and returns the first line of the run's page."""
    train(load_config("laboratory", [*FEW, *changes]), out=folder)
    result, page = health(read_run(folder)), write_report(folder).read_text()
    assert f"<dd>{escape(result.headline)}.</dd>" in page
    assert all(escape(finding.detail) in page for finding in result.findings)
    assert result.text.startswith(f"{result.learned}. ")
    return result.text.removeprefix(f"{result.learned}. ")


def test_a_sampler_in_eight_bits_is_healthy(tmp_path: Path) -> None:
    assert verdict(tmp_path / "run", *regime("int8").settings, "trainer.steps=20") == "Healthy over 20 steps."


def test_a_collapse_is_not_healthy_where_trainer_and_sampler_agree(tmp_path: Path) -> None:
    text = verdict(tmp_path / "run", "optim.lr=3e-3", "optim.warmup=20", "trainer.steps=24", "trainer.max_idle_steps=0")
    assert text.startswith("Not healthy over 24 steps: ")
    assert "held-out accuracy on sort fell from " in text


def test_responses_that_are_all_cut_are_not_healthy_and_the_first_line_says_why(tmp_path: Path) -> None:
    text = verdict(tmp_path / "run", "sampling.max_tokens=4", "trainer.steps=6", "trainer.prompts=4")
    assert text.startswith(
        "Not healthy over 6 steps: nothing was learned in 6 of 6 steps: every response got reward 0,"
    )
    assert "of the responses were cut by the length limit" in text
    assert "figures logged as not finite" not in text


@pytest.mark.slow
def test_the_quickstart_is_healthy(tmp_path: Path) -> None:
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
