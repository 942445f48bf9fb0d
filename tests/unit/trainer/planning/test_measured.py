"""From a synchronous run's files to the asynchronous run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trimtab.errors import TrimtabError
from trimtab.trainer.config import parse_config
from trimtab.trainer.planning.measured import predict_from_run

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
    result = predict_from_run(run(tmp_path, slow_start + [STEP] * 4 + outlier), None)
    # What the step took besides its phases is the trainer's: 5 - 4.875.
    phases = {"generate": 3.0, "train": 0.25 + 1.0 + 0.125, "score": 0.5, "publish": 0.125, "load": 0.0}
    assert result["measured"] == {**phases, "step": 5.0, "steps": 5}
    assert result["tokens_per_second"] == {"generate": 100.0, "train": pytest.approx(280 / 1.375)}
    assert result["lag"]["updates"] == 2


def test_an_asynchronous_run_is_no_measurement(tmp_path: Path) -> None:
    with pytest.raises(TrimtabError, match=r"max_lag = 4.*predict from a run without max_lag"):
        predict_from_run(run(tmp_path, [STEP] * 6, max_lag=4), None)


def test_what_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(TrimtabError, match="holds no run"):
        predict_from_run(tmp_path / "nothing", None)
    with pytest.raises(TrimtabError, match="has 2 steps"):
        predict_from_run(run(tmp_path, [STEP] * 2), None)
    (tmp_path / "metrics.jsonl").write_text("{\n")
    with pytest.raises(TrimtabError, match=r"metrics.jsonl.*line 1"):
        predict_from_run(tmp_path, None)
    (tmp_path / "config.toml").write_text("[")
    with pytest.raises(TrimtabError, match=r"config\.toml"):
        predict_from_run(tmp_path, None)
