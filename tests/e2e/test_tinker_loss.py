"""tinker 0.38 sends the gradient of Trimtab's losses to its service: functions of its SDK, on data of its types."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-bench" / "bin" / "python"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="no tinker here: make bench-install installs it"),
]


def test_the_weights_of_the_backward_pass_are_the_gradient() -> None:
    ended = subprocess.run(
        [str(PYTHON), str(ROOT / "tests" / "programs" / "tinker_loss.py")],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    results = json.loads(ended.stdout)
    assert set(results) == {"icepop", "seq-tis", "m2po", "token-bypass"}
    for gaps in results.values():
        assert gaps["largest"] > 0.01
        assert gaps["loss"] < 1e-6
        assert gaps["weights"] < 1e-7
