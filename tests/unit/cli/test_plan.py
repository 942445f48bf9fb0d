"""`trimtab plan` as a command."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.unit.trainer.planning.test_measured import STEP, run

from trimtab.cli import main

SEVEN = ["plan", "--model", "qwen2.5-7b", "--gpus", "8", "--prompts", "64", "--response", "2048"]


def test_the_output_has_every_part_of_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(SEVEN) == 0
    output = capsys.readouterr().out
    for part in ("engines.count", "trainer.ranks", "seconds.step", "lag.max_lag", "fits ", "none of this was measured"):
        assert part in output, part
    assert "ray.trainers = " in output
    assert "trainer.max_lag = " in output
    # 7.62 billion parameters of two bytes on one GPU; every assumption has its reason behind it.
    assert re.search(r"engines\.weights +15\.23 G\n", output)
    assert re.search(r"assumptions\.parallel +0\.9  share of an engine's speed", output)


def test_json_holds_the_numbers_of_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([*SEVEN, "--assume", "score=30", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["fits"] is True
    assert values["assumptions"]["score"] == 30
    assert values["engines"]["count"] * values["engines"]["gpus"] + values["trainer"]["ranks"] == 8
    seconds = values["seconds"]
    assert seconds["step"] >= max(seconds["generate"], seconds["train"])
    assert seconds["step_in_turn"] == pytest.approx(
        sum(seconds[phase] for phase in ("generate", "train", "score", "publish", "load"))
    )
    assert values["lag"]["max"] <= values["lag"]["max_lag"] == values["recipe"]["trainer.max_lag"]


def test_a_measured_run_is_predicted_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["plan", "--run", str(run(tmp_path, [STEP] * 6)), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    # 5 seconds in turn, 3 of them generation: one step ahead hides the rest.
    assert values["predicted"]["step"] == 3.0
    assert values["recipe"] == {"trainer.max_lag": 2}
    assert main.run(["plan", "--run", str(tmp_path), "--max-lag", "0"]) == 0
    assert re.search(r"predicted\.step +5\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "name --model and --gpus"),
        (["--model", "qwen2.5-7b", "--gpus", "1"], "2"),
        (["--model", "qwen2.5-7b", "--gpus", "8", "--device", "h1000"], "unknown device"),
        (["--model", "qwen2.5-7b", "--gpus", "8", "--mean", "99999"], "--mean 99999 is above"),
        (["--run", "/nowhere"], "holds no run"),
        (["--run", "/nowhere", "--gpus", "8"], "leave --model, --gpus and --assume out"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["plan", *arguments]) == 2
    line = capsys.readouterr().err
    assert named in line
    assert line.count("\n") == 1
