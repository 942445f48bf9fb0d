"""Text that others wrote (files, names, exceptions) reaches a terminal with its control characters escaped."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tests.support.commands import Done, here, process

from trimtab.errors import TrimtabWarning

pytestmark = pytest.mark.slow

# Sets the title of a terminal, colors what follows, shows it in another order, and two kinds of rich markup.
HARMFUL = "\x1b]0;owned\x07\x9b31m\u202e[red]x[link=http:e]y"
SHOWN = "\\x1b]0;owned\\x07\\x9b31m\\u202e[red]x[link=http:e]y"
RAW = ("\x1b", "\x07", "\x9b", "\u202e")


def harmless(done: Done) -> Done:
    assert not [mark for mark in RAW if mark in done.stdout + done.stderr]
    return done


def test_an_error_shows_names_of_a_file_escaped(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(f"{json.dumps(HARMFUL)} = 1\n")
    (tmp_path / "columns.jsonl").write_text(json.dumps({HARMFUL: [0.1], "response_ids": [1]}) + "\n")
    assert SHOWN in harmless(here("train", "recipe.toml", cwd=tmp_path)).stderr
    assert SHOWN in harmless(here("diagnose", "columns.jsonl", cwd=tmp_path)).stderr


def test_a_warning_a_table_and_json_show_the_name_of_a_task_escaped(tmp_path: Path) -> None:
    rows = [{"question": f"{one}+{one}", "answer": str(2 * one)} for one in range(6)]
    (tmp_path / f"{HARMFUL}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    name = json.dumps(f"{HARMFUL}.jsonl")
    task = f"file:path={name},test_path={name},style='plain'"
    words = ("eval", "laboratory", "--task", task, "--problems", "2", "--max-tokens", "2")
    done = harmless(process(*words, cwd=tmp_path))
    assert done.stderr == (
        f"trimtab: warning: {SHOWN}.jsonl: 6 training rows are also in the test split and are left out of training\n"
    )
    assert "\\x1b]0;owned" in done.stdout
    assert "[red]x" in done.stdout
    with pytest.warns(TrimtabWarning, match="6 training rows are also in the test split"):
        data = harmless(here(*words, "--json", cwd=tmp_path))
    assert json.loads(data.stdout)["results"][0]["task"] == HARMFUL


def test_the_traceback_of_a_bug_is_escaped(tmp_path: Path) -> None:
    program = f"""
        from trimtab.cli import main
        def run(arguments):
            raise RuntimeError({HARMFUL!r})
        main.run = run
        main.main()
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    text = done.stderr.decode()
    assert f"RuntimeError: {SHOWN}" in text
    assert not [mark for mark in RAW if mark in text]
