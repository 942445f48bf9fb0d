"""The progress of a run on a terminal and off it, and in TensorBoard and W&B."""

from __future__ import annotations

import importlib.util
import io
import math
import re
import sys
from pathlib import Path

import pytest
from rich.table import Table

from trimtab.errors import TrimtabError
from trimtab.trainer.config import LogConfig, load_config
from trimtab.trainer.display import PlainTextConsole, RunDisplay, closing_lines, figures, progress_bar
from trimtab.trainer.observer import open_sinks

STEP: dict[str, float | str] = {
    "step": 3,
    "reward/mean": 0.512,
    "mismatch/k3": 0.00123,
    "mismatch/ess_token": 0.987,
    "clip/low": 0.01,
    "clip/second_moment": 0.02,
    "reject/tokens": 0.25,
    "tokens_per_second/rollout": 1234.0,
    "tokens_per_second/train": 987.0,
    "time/step": 2.0,
}


def played(*, terminal: bool, words: str = "loss = [A] of\n  r") -> str:
    """What a whole run writes."""
    file = io.StringIO()
    console = PlainTextConsole(file=file, force_terminal=terminal, width=100, color_system=None)
    with progress_bar(console) as bar:
        display = RunDisplay(bar)
        display.started(load_config({}), words, 10, Path("runs/x"))
        display.phase(words, 1, 4)
        display.evaluated("sort", "before", 0.25)
        display.step(STEP)
        display.message("step 3: reward of '[bold]x[/bold]' failed")
        display.evaluated("sort", 5, 0.5)
        summary = {"eval/sort/before": 0.25, "eval/sort/after": 0.75, "eval/sort/problems": 64}
        display.finished(summary, Path("/" + "a" * 150) / "report.html")
        table = Table(words, title=words)
        table.add_row(words)
        console.print(table)
    return file.getvalue()


def test_a_run_that_discards_steps_is_longer() -> None:
    file = io.StringIO()
    with progress_bar(PlainTextConsole(file=file, force_terminal=False, width=100)) as bar:
        display = RunDisplay(bar)
        display.started(load_config({}), "", 10, Path("runs/x"))
        display.phase("collect", 2, 17)
        display.phase("update", 1, 4)
        display.step(STEP)
        assert bar.tasks[0].total == 17
    assert "step 3/17 " in file.getvalue()
    assert "eta 28 s" in file.getvalue(), "of 14 steps of two seconds"


def test_a_run_is_one_line_per_event() -> None:
    lines = played(terminal=False).splitlines()
    assert lines[0] == "run        runs/x"
    assert "  loss = [A] of" in lines, "an equation is not markup"
    assert (
        "step 3/10  reward 0.512  k3 1.2e-3  ESS 0.987  clipped 3.00%  rejected 25.00%  roll tok/s 1,234"
        "  train tok/s 987  s/step 2.0  eta 14 s"
    ) in lines
    assert "step 3: reward of '[bold]x[/bold]' failed" in lines
    assert "held-out greedy accuracy on sort, after step 5: 0.500" in lines
    # Wilson by hand: (p + z2/128 -+ z sqrt(p (1-p)/64 + z2/16384)) / (1 + z2/64), z2 = 3.8415
    closing = (
        "held-out greedy accuracy (sort, 64 problems): 0.250 -> 0.750, 95% interval [0.160, 0.368] -> [0.632, 0.840]"
    )
    assert lines.index(closing) + 1 == lines.index(f"report: /{'a' * 150}/report.html"), "paths are not broken"


def test_a_terminal_gets_a_bar_and_its_cursor_back() -> None:
    written = played(terminal=True)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", written)
    for part in ("loss = [A] of", "step 3/10", "1.2e-3", "30%", "eta 14 s", "0.250 -> 0.750", "[bold]x[/bold]"):
        assert part in text
    assert written.rfind("\x1b[?25h") > written.rfind("\x1b[?25l"), "the cursor is shown again at the end"


def test_numbers_a_run_does_not_have_are_left_out_and_episodes_have_columns() -> None:
    assert figures({"step": 1, "sft/loss": 1.25}) == [("loss", "1.2500")]
    assert ("rejected", "0.00%") in figures({"mismatch/k3": 0.1}), "without rules nothing is rejected"
    assert figures({"reward/mean": "odd", "mismatch/anchor": "current"}) == []
    episode = {"episode/calls": 1.25, "episode/tool_errors": 0.5, "episode/void": 0.0625, "reward/mean": 0.5}
    columns = [("reward", "0.500"), ("calls", "1.25"), ("tool errors", "50.0%"), ("void", "6.2%")]
    assert figures(episode) == columns


def test_closing_lines_include_unknown_keys() -> None:
    summary = {"eval/a/after": 0.5, "seconds": 12.34567, "note": "text"}
    assert closing_lines(summary) == ["held-out greedy accuracy (a): 0.500", "seconds: 12.35", "note: text"]


HARMFUL = "\x1b]0;owned\x07\x9b31m\u202e[red]x[/red][link=http://e]y[/link]:boom:"


@pytest.mark.parametrize("terminal", [False, True])
def test_text_of_others_is_neither_markup_nor_control(terminal: bool) -> None:
    text = played(terminal=terminal, words=HARMFUL)
    assert not [mark for mark in ("\x1b]", "\x07", "\x9b", "\u202e") if mark in text]
    assert text.count("\\x1b]0;owned") >= 2, "in the equation and in the table"


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
