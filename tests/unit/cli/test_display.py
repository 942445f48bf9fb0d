"""The live view: the right numbers, on a terminal and off it, and a terminal that is restored."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table

from trimtab.cli.console import PlainTextConsole
from trimtab.cli.display import LiveDisplay, PlainDisplay, closing_lines, duration, figures, sparkline
from trimtab.config import load_config

STEP: dict[str, float | str] = {
    "step": 3,
    "reward/mean": 0.512,
    "mismatch/k3": 0.00123,
    "mismatch/ess_token": 0.987,
    "clip/low": 0.01,
    "clip/high": 0.02,
    "reject/tokens": 0.25,
    "tokens_per_second/rollout": 1234.0,
    "tokens_per_second/train": 987.0,
    "time/step": 2.0,
}


def _console(*, terminal: bool) -> tuple[PlainTextConsole, io.StringIO]:
    file = io.StringIO()
    return PlainTextConsole(file=file, force_terminal=terminal, width=100, color_system=None), file


def _play(display: PlainDisplay, config: Any) -> None:
    display.started(config, "loss = [A] of\n  r", 10, Path("runs/x"))
    display.phase("collect", 1, 4)
    display.evaluated("sort", "before", 0.25)
    display.step(STEP)
    display.message("step 3: reward of '[bold]x[/bold]' failed")
    display.evaluated("sort", 5, 0.5)
    summary = {"eval/sort/before": 0.25, "eval/sort/after": 0.75, "eval/sort/problems": 64}
    display.finished(summary, Path("runs/x/report.html"))
    display.close()


def test_plain_output_is_one_line_per_event() -> None:
    console, file = _console(terminal=False)
    _play(PlainDisplay(console), load_config({"eval": {"problems": 99999999}}))
    lines = file.getvalue().splitlines()
    assert lines[0] == "run        runs/x"
    assert "  loss = [A] of" in lines, "an equation is not markup"
    assert (
        "step 3/10  reward 0.512  k3 1.2e-03  ESS 0.987  clipped 3.00%  rejected 25.00%  roll tok/s 1,234"
        "  train tok/s 987  s/step 2.0  eta 14s"
    ) in lines
    assert "step 3: reward of '[bold]x[/bold]' failed" in lines
    assert "held-out greedy accuracy on sort, after step 5: 0.500" in lines
    assert lines[-2:] == [
        # Wilson by hand: (p + z2/128 -+ z sqrt(p (1-p)/64 + z2/16384)) / (1 + z2/64), z2 = 3.8415
        "held-out greedy accuracy (sort, 64 problems): 0.250 -> 0.750, 95% interval [0.160, 0.368] -> [0.632, 0.840]",
        "report: runs/x/report.html",
    ]


def test_a_terminal_gets_a_panel_and_its_cursor_back() -> None:
    console, file = _console(terminal=True)
    _play(LiveDisplay(console), load_config({}))
    written = file.getvalue()
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", written)
    for part in ("loss = [A] of", "step 3/10", "1.2e-03", "25.00%", "eta 14s", "0.250 -> 0.750", "[bold]x[/bold]"):
        assert part in text
    assert written.rfind("\x1b[?25h") > written.rfind("\x1b[?25l"), "the cursor is shown again at the end"


def test_the_terminal_is_restored_after_an_error() -> None:
    console, file = _console(terminal=True)
    display = LiveDisplay(console)
    display.phase("collect", 0, 0)
    assert "\x1b[?25l" in file.getvalue()
    display.close()
    display.close()
    assert file.getvalue().rfind("\x1b[?25h") > file.getvalue().rfind("\x1b[?25l")


def test_long_paths_are_not_broken_off_the_terminal() -> None:
    console, file = _console(terminal=False)
    path = Path("/" + "a" * 150) / "report.html"
    PlainDisplay(console).finished({}, path)
    assert file.getvalue() == f"report: {path}\n"


@pytest.mark.parametrize(
    ("values", "line"),
    [([0.0, 1.0], "▁█"), ([0.5, 0.5, 0.5], "▁▁▁"), ([0, 1, 2, 3, 4, 5, 6, 7], "▁▂▃▄▅▆▇█"), ([1.0], "▁")],
)
def test_sparkline(values: list[float], line: str) -> None:
    assert sparkline(values, 48) == line


def test_a_long_history_is_averaged_into_the_width() -> None:
    # Pairs average to 0.5, 2.5, 4.5, 6.5: the ends are the scale, the middle lies a third in between.
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 4) == "▁▃▆█"
    assert len(sparkline([0.1 * index for index in range(1000)], 48)) == 48


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0s"), (59.4, "59s"), (60, "1m00s"), (187, "3m07s"), (7500, "2h05m")]
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_numbers_a_run_does_not_have_are_left_out() -> None:
    assert figures({"step": 1, "sft/loss": 1.25}) == [("loss", "1.2500")]
    assert ("rejected", "0.00%") in figures({"mismatch/k3": 0.1}), "without rules nothing is rejected"
    assert figures({"reward/mean": "odd", "mismatch/anchor": "current"}) == []


def test_episodes_have_columns_of_their_own() -> None:
    episode = {"episode/calls": 1.25, "episode/tool_errors": 0.5, "episode/void": 0.0625, "reward/mean": 0.5}
    columns = [("reward", "0.500"), ("calls", "1.25"), ("tool errors", "50.0%"), ("void", "6.2%")]
    assert figures(episode) == columns


def test_closing_lines_include_unknown_keys() -> None:
    summary = {"eval/a/after": 0.5, "seconds": 12.34567, "note": "text"}
    assert closing_lines(summary) == ["held-out greedy accuracy (a): 0.500", "seconds: 12.35", "note: text"]


HARMFUL = "\x1b]0;owned\x07\x9b31m\u202e[red]x[/red][link=http://e]y[/link]:boom:"


@pytest.mark.parametrize("terminal", [False, True])
def test_text_of_others_is_neither_markup_nor_control(terminal: bool) -> None:
    file = io.StringIO()
    console = PlainTextConsole(file=file, force_terminal=terminal, width=400, color_system="truecolor")
    config = load_config("quickstart")
    display = (LiveDisplay if terminal else PlainDisplay)(console)
    display.started(config, HARMFUL, 10, Path(f"runs/{HARMFUL}"))
    display.phase(HARMFUL, 1, 4)
    display.step(STEP)
    display.message(HARMFUL)
    display.finished({HARMFUL: 1.0}, None)
    table = Table(HARMFUL, title=HARMFUL)
    table.add_row(HARMFUL)
    console.print(table)
    text = file.getvalue()
    assert not [mark for mark in ("\x1b]", "\x07", "\x9b", "\u202e") if mark in text]
    # The run directory, equation, message, result, header and cell. Rich drops the bell.
    assert text.count("\\x1b]0;owned\\x9b31m\\u202e[red]x[/red][link=http:/") >= 6
