"""TensorBoard and W&B get what metrics.jsonl gets; a missing package is named."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path

import pytest

from trimtab.errors import TrimtabError
from trimtab.trainer.config import LogConfig
from trimtab.trainer.sinks import open_sinks

HAS_WANDB = importlib.util.find_spec("wandb") is not None


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), purge_orphaned_data=True)
    events.Reload()
    return {
        key: [(event.step, event.value) for event in events.Scalars(key)]  # pyright: ignore[reportAttributeAccessIssue]
        for key in events.Tags()["scalars"]
    }


def test_tensorboard_draws_every_number(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (sink,) = open_sinks(LogConfig(tensorboard=True), tmp_path)
    sink.log(0, {"step": 0, "eval/arithmetic/greedy": 0.25})
    sink.log(1, {"step": 1, "reward/mean": 0.5, "mismatch/anchor": "proximal", "optim/skipped": 2, "gone": None})
    sink.log(2, {"step": 2, "reward/mean": math.nan, "mismatch/anchor": "proximal"})
    sink.close()
    result = curves(tmp_path / "tensorboard")
    assert result["eval/arithmetic/greedy"] == [(0, 0.25)]
    assert result["optim/skipped"] == [(1, 2.0)]
    assert result["reward/mean"][0] == (1, 0.5)
    assert math.isnan(result["reward/mean"][1][1])
    assert not {"step", "gone", "mismatch/anchor"} & set(result)


def test_a_resumed_run_hides_what_it_does_again(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (sink,) = open_sinks(LogConfig(tensorboard=True), tmp_path)
    for step in range(4):
        sink.log(step, {"x": float(step)})
    sink.close()
    (resumed,) = open_sinks(LogConfig(tensorboard=True), tmp_path, first_step=2)
    resumed.log(2, {"x": 20.0})
    resumed.close()
    assert curves(tmp_path / "tensorboard")["x"] == [(0, 0.0), (1, 1.0), (2, 20.0)]


def test_without_sinks_nothing_is_opened(tmp_path: Path) -> None:
    assert open_sinks(LogConfig(), tmp_path) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_names_the_command(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(TrimtabError, match=rf"pip install '\.\[{name}\]' in a checkout"):
        open_sinks(LogConfig.model_validate({name: name == "tensorboard" or "project"}), tmp_path)


@pytest.mark.skipif(not HAS_WANDB, reason="wandb is not installed")
def test_wandb_offline_keeps_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    (tmp_path / "config.toml").write_text("seed = 3\n")
    for step in range(2):
        (sink,) = open_sinks(LogConfig(wandb="trimtab-test"), tmp_path)
        sink.log(step, {"step": step, "reward/mean": 0.5, "mismatch/anchor": "proximal"})
        sink.close()
    ids = {item.name.split("-")[-1] for item in (tmp_path / "wandb").glob("offline-run-*")}
    assert ids == {(tmp_path / "wandb-id").read_text()}
