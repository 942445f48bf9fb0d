"""The command line of a grid: lists, mistakes, and the remaining time."""

from __future__ import annotations

import io
import math
import re
from pathlib import Path

import pytest
from rich.progress import Progress
from typer.main import get_command

from trimtab.cli.main import app, run
from trimtab.runs.summary import RunSummary
from trimtab.trainer import display
from trimtab.trainer.config import load_config
from trimtab.trainer.display import PACE_SECONDS, PlainTextConsole, RunsDisplay


def parsed(*words: str) -> dict[str, object]:
    command = get_command(app).commands["compare"]  # type: ignore[attr-defined]  # a group
    return dict(command.make_context("compare", list(words)).params)


def test_words_after_a_list_option_belong_to_it_until_the_next_option() -> None:
    result = parsed("--methods", "dapo", "icepop:weight_max=3", "--seeds", "2", "--regimes", "int3", "--set", "a.b=1")
    assert result["methods"] == ["dapo", "icepop:weight_max=3"]
    assert (result["regimes"], result["seeds"], result["sets"]) == (["int3"], 2, ["a.b=1"])
    assert parsed("--methods", "a", "--methods", "b")["methods"] == ["a", "b"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--methods", "dapo", "tokentis"], "unknown objective 'tokentis' .*token-tis"),
        (["--regimes", "stale-33"], "unknown regime 'stale-33' .*stale-32"),
        (["--methods", "--seeds", "2"], "--methods names nothing"),
        (["--regimes"], "--regimes names nothing"),
        (["--seeds", "0"], "Invalid value for '--seeds'"),
        (["--set", "trainer.epoch=2"], "unknown key 'trainer.epoch'"),
        (["dapo"], "unexpected extra argument"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], line: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["compare", *words, "--out", str(tmp_path / "out")]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert re.search(line, lines[0])
    assert not (tmp_path / "out").exists()


def test_progress_is_weighted_by_cost_and_a_line_per_run_says_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    time, file = [100.0], io.StringIO()
    bar = Progress(
        console=PlainTextConsole(file=file), disable=True, get_time=lambda: time[0], speed_estimate_period=PACE_SECONDS
    )
    progress = RunsDisplay(bar)
    steps = {"a": 4, "b": 4, "c": 8}
    cells = {name: load_config("laboratory", [f"trainer.steps={count}"]) for name, count in steps.items()}
    monkeypatch.setattr(display, "_cost", lambda config: 10.0 * config.trainer.steps)
    done = RunSummary("done", reward=0.5, seconds=7.0)
    progress.planned(cells, {"c": done})
    assert bar.tasks[0].total == 80  # what c cost is not counted
    for seconds, name, step in ((0, "a", 1), (10, "a", 2), (10, "b", 2)):
        time[0] += seconds
        progress.progress(name, step)
    assert bar.tasks[0].completed == 10 * (2 + 2)
    # 30 units in 20 seconds since the first report; 40 are left.
    assert bar.tasks[0].time_remaining == pytest.approx(math.ceil(40 / 1.5))
    time[0] += 20
    progress.finished("a", done)
    lines = file.getvalue().splitlines()
    assert lines[0] == "3 runs, one thread each; 1 of them finished before"
    # 50 units in 40 seconds.
    assert lines[1] == "2/3  a  reward 0.50  (7 s)  about 16 s left"
