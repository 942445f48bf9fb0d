"""The subclass of docs/frameworks.md for TRL writes files that `diagnose` reads, and does not fill the console."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tests.support import forked
from tests.support.bench_environment import needs_bench

import trimtab

pytestmark = [pytest.mark.slow, needs_bench]


def test_the_subclass_writes_a_file_for_each_generation_and_prints_nothing(bench: forked.Run, tmp_path: Path) -> None:
    ended = bench(Path(__file__).parents[1] / "programs" / "trl_subclass.py", cwd=tmp_path)
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
