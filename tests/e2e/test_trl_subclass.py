"""The subclass of docs/frameworks.md for TRL writes files that `diagnose` reads, and does not fill the console."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

import trimtab

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-bench" / "bin" / "python"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="no TRL here: make bench-install installs it"),
]


def test_the_subclass_writes_a_file_for_each_generation_and_prints_nothing(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "TRL_EXPERIMENTAL_SILENCE": "1"}
    command = [str(PYTHON), str(ROOT / "tests" / "programs" / "trl_subclass.py")]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=600, env=environment, cwd=tmp_path, check=False
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    longest = max(map(len, (ended.stdout + ended.stderr).splitlines()))
    assert len(ended.stdout) < 20_000, "six lines of metrics of TRL itself"
    assert longest < 3_000
    files = sorted((tmp_path / "logps").iterdir())
    assert [file.name for file in files] == ["step-000000.jsonl", "step-000002.jsonl", "step-000004.jsonl"]
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert {len(file.read_text().splitlines()) for file in files} == {8}
    measured = trimtab.diagnose(tmp_path / "logps").measured
    assert measured.origin.framework == "trl"
    assert measured.origin.responses == len(rows) == 24
    assert len(np.unique(measured.sample.group)) == 6, "two prompts for each of three generations"
    assert 0.02 < measured.size.mismatch["k3"] < 0.1  # noise of .3 nats on the sampler's log-probs
