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
