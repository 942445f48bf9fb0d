"""`objective.calibrate` in real training: the share kept is the one aimed at, and a resumed run has the same bounds."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.run_results import Messages, untimed

from trimtab.objectives.calibrate import Observed, calibrated
from trimtab.report.run_objective import equation_of
from trimtab.report.run_report import write_report
from trimtab.runs.reader import read_run
from trimtab.runs.trajectories import read as read_trajectories
from trimtab.trainer.config import Config, load_config
from trimtab.trainer.run import train

pytestmark = pytest.mark.e2e


def recipe(steps: int, *changes: str) -> Config:
    """128 responses a step, sampled with weights rounded to four bits: enough mismatch for a mask to see."""
    small = (
        f"trainer.steps={steps}",
        "engine.quantize=int4",
        "eval.problems=4",
        "eval.every=0",
        "checkpoint.every=1",
        "checkpoint.keep=99",
        "log.trajectories_every=1",
    )
    return load_config("laboratory", [*small, *changes])


def bounds(row: dict[str, Any]) -> dict[str, float]:
    kept = ("calibrate/kept", "calibrate/kept_published")
    result = {key: value for key, value in row.items() if key.startswith("calibrate/") and key not in kept}
    return {key.removeprefix("calibrate/"): value for key, value in result.items()}


@pytest.fixture(scope="module")
def calibrated_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Messages]:
    out, messages = tmp_path_factory.mktemp("calibrate") / "whole", Messages()
    train(recipe(4, "objective.name=geo-mask", "objective.calibrate=true"), out=out, observer=messages)
    return out, messages


def test_calibrated_bounds_keep_what_published_ones_throw_away(
    calibrated_run: tuple[Path, Messages], tmp_path: Path
) -> None:
    run, messages = calibrated_run
    train(recipe(1, "objective.name=geo-mask"), out=tmp_path / "published")
    published = untimed(tmp_path / "published", "eval/")[0]
    first, *rest = untimed(run, "eval/")
    # Both runs sampled the same first batch.
    assert published["mismatch/k3"] == first["mismatch/k3"]
    assert first["calibrate/kept_published"] == pytest.approx(1 - published["reject/tokens"])
    assert first["calibrate/kept"] == pytest.approx(1 - first["reject/tokens"])
    assert first["calibrate/kept"] >= 0.97 > 0.7 > first["calibrate/kept_published"]
    # The mismatch stays what it is, so do the bounds, and later batches fare alike.
    assert all(bounds(row) == bounds(first) and 1 - row["reject/tokens"] > 0.85 for row in rest)
    line = next(line for line in messages.lines if line.startswith("calibrated at step 0 on 128 responses"))
    assert f"keep_min = {bounds(first)['keep_min']:g}" in line


def test_the_bounds_are_those_of_the_logged_trajectories(calibrated_run: tuple[Path, Messages]) -> None:
    run, _ = calibrated_run
    first = read_trajectories(run / "trajectories" / "step-000001.parquet")
    parts = [(np.asarray(row.logp_proximal), row.trajectory.completion.logp_behavior) for row in first]
    messages = [
        Observed.of(
            torch.from_numpy(proximal.astype(np.float32))[None],
            torch.from_numpy(behavior)[None],
            torch.ones(1, len(behavior), dtype=torch.bool),
        )
        for proximal, behavior in parts
    ]
    whole = messages[0]
    for part in messages[1:]:
        whole = whole + part
    result = calibrated("geo-mask", whole)
    assert result == pytest.approx(bounds(untimed(run, "eval/")[0]), rel=1e-5)


def test_the_report_shows_the_bounds_that_were_used(calibrated_run: tuple[Path, Messages]) -> None:
    run, _ = calibrated_run
    config = tomllib.loads((run / "config.toml").read_text())
    result = bounds(untimed(run, "eval/")[0])
    equation = equation_of(config, untimed(run, "eval/")[-1])
    assert f"{result['keep_min']:g} ≤ ρ_geo ≤ {result['keep_max']:g}" in equation
    page = write_report(read_run(run)).read_text()
    assert f"{result['keep_min']:g} ≤ ρ_geo" in re.sub(r"&le;", "≤", page)


def test_several_updates_a_batch_and_opsm_calibrate_on_the_whole_first_batch(tmp_path: Path) -> None:
    config = recipe(1, "objective.name=opsm", "objective.calibrate=true", "trainer.minibatches=4", "trainer.prompts=8")
    messages = Messages()
    train(config, out=tmp_path / "run", observer=messages)
    assert any("on 64 responses: delta = " in line for line in messages.lines)
    assert untimed(tmp_path / "run", "eval/")[0]["calibrate/kept"] > 0.97


def test_a_first_batch_that_is_fresher_than_the_rest_is_cautioned_about(
    calibrated_run: tuple[Path, Messages], tmp_path: Path
) -> None:
    def cautions(messages: Messages) -> list[str]:
        return [line for line in messages.lines if line.startswith("caution: this first batch is fresh")]

    messages = Messages()
    lagging = ("trainer.prompts=4", "trainer.sync_every=4", "objective.name=geo-mask", "objective.calibrate=true")
    train(recipe(1, *lagging), out=tmp_path / "stale", observer=messages)
    assert ["up to 3 updates older" in line for line in cautions(messages)] == [True]
    assert not cautions(calibrated_run[1])
