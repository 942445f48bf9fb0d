"""The environment of `make bench-install`, which has TRL and verl."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / os.environ.get("BENCH", ".venv-bench") / "bin" / "python"
PATH = str(ROOT / "src")

needs_bench = pytest.mark.skipif(
    not os.access(PYTHON, os.X_OK), reason="no TRL and no verl here: make bench-install installs them"
)


def result_of(ended: subprocess.CompletedProcess[str]) -> Any:
    """The JSON that a program prints as its last line."""
    assert ended.returncode == 0, ended.stderr[-2000:]
    return json.loads(ended.stdout.splitlines()[-1])


def check_equal(cases: dict[str, Any], scale: float, gradient: float = 1e-6) -> None:
    """Asserts that losses and gradients, relative to their scale, are equal in cases whose gradients are not all 0."""
    for name, case in cases.items():
        assert case["scale"] > scale, name
        assert case["loss"] <= 1e-6, name
        assert case["gradient"] <= gradient, name
