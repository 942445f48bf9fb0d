"""From a synchronous run's files to the asynchronous run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trimtab.config import parse_config
from trimtab.errors import TrimtabError
from trimtab.planning.measured import read_phases
from trimtab.planning.pipeline_schedule import Phases

STEP = {
    "step": 1,
    "time/collect": 3.0,
    "time/score": 0.5,
    "time/proximal": 0.25,
    "time/update": 1.0,
    "time/publish": 0.125,
    "time/step": 5.0,
    "tokens/rollout": 300.0,
    "tokens/train": 280.0,
}


def run(folder: Path, rows: list[dict[str, Any]], **trainer: int) -> Path:
    config = parse_config({"trainer": {"minibatches": 2, **trainer}}, "test")
    (folder / "config.toml").write_text(config.dump())
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_phases_are_medians_after_the_first_steps(tmp_path: Path) -> None:
    slow_start = [{**STEP, "time/collect": 90.0, "time/step": 92.0}]
    outlier = [{**STEP, "time/update": 9.0, "time/step": 13.0}]
    result = read_phases(run(tmp_path, slow_start + [STEP] * 4 + outlier))
    # What the step took besides its phases is the trainer's: 5 - 4.875.
    assert result.phases == Phases(generate=3.0, train=0.25 + 1.0 + 0.125, score=0.5, publish=0.125)
    assert result.phases.in_turn == 5.0
    assert (result.steps, result.updates, result.generated, result.trained) == (5, 2, 300.0, 280.0)


def test_an_asynchronous_run_is_no_measurement(tmp_path: Path) -> None:
    with pytest.raises(TrimtabError, match=r"max_lag = 4.*predict from a run without max_lag"):
        read_phases(run(tmp_path, [STEP] * 6, max_lag=4))


def test_what_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(TrimtabError, match="holds no run"):
        read_phases(tmp_path / "nothing")
    with pytest.raises(TrimtabError, match="has 2 steps"):
        read_phases(run(tmp_path, [STEP] * 2))
    (tmp_path / "metrics.jsonl").write_text("{\n")
    with pytest.raises(TrimtabError, match=r"metrics.jsonl.*line 1"):
        read_phases(tmp_path)
    (tmp_path / "config.toml").write_text("[")
    with pytest.raises(TrimtabError, match=r"config\.toml"):
        read_phases(tmp_path)
