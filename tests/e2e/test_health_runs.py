"""The quickstart is healthy; verdicts on other runs: tests/unit/report/test_health.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from trimtab.report.health import health
from trimtab.runs.reader import read_run
from trimtab.trainer.config import load_config
from trimtab.trainer.run import train


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
