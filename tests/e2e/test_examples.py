"""Every file of examples/ does what it says: its own commands run as it prints them, beside a copy of the folder."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support import forked

from trimtab.runs.directory import read_metrics

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRATCH = "grpo_from_scratch.py"  # has a test of its own, which runs it once
FILES = sorted({path.name for path in EXAMPLES.iterdir() if path.suffix in (".toml", ".py")} - {SCRATCH})
# Added where an example trains a shipped recipe, whose length is not its own.
SHORT = " --set trainer.steps=4 --set eval.problems=16"


def commands(file: str) -> list[str]:
    """The commands that an example prints: lines of its comment or docstring."""
    return re.findall(r"^#? *((?:trimtab|python) \S.*)$", (EXAMPLES / file).read_text(), re.MULTILINE)


@pytest.mark.parametrize("file", FILES)
def test_an_example_runs_as_it_says(file: str, python: forked.Run, tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES, tmp_path / "examples", ignore=shutil.ignore_patterns("runs", "__pycache__"))
    assert commands(file), f"{file} does not begin with a command that runs it"
    for command in commands(file):
        words = shlex.split(command + SHORT * command.startswith("trimtab train laboratory"))
        program = [Path(sys.executable).with_name("trimtab")] if words[0] == "trimtab" else []
        done = python(*program, *words[1:], cwd=tmp_path)
        assert done.returncode == 0, f"{command}\n{done.stderr[-3000:]}"
        assert done.stdout, command
    for run in (tmp_path / "runs").glob("*"):
        rewards = [row["reward/mean"] for row in read_metrics(run / "metrics.jsonl")]
        # The warm-started model earns about .35 on average from the start; without a signal it would be 0.
        assert max(rewards) > 0.1, f"{run.name} of {file} trains on no signal"


def test_grpo_from_scratch_is_short_and_learns() -> None:
    """Measured over seeds 0 to 2: .47 to .82, .67 to .87, .40 to .57; the best of the last three gains .19 and more.

    Minutes on a processor without bfloat16 instructions, since its sampler is plain PyTorch in bfloat16.
    """
    file = EXAMPLES / SCRATCH
    assert commands(SCRATCH) == [f"python examples/{SCRATCH}"]
    assert len(file.read_text().splitlines()) <= 150
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=1500, check=True)
    accuracies = [float(result) for result in re.findall(r"held-out accuracy (\S+)", done.stdout)]
    assert len(accuracies) == 7
    assert max(accuracies[-3:]) > accuracies[0] + 0.08


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_prints_what_it_shows(path: Path, python: forked.Run, tmp_path: Path) -> None:
    """Its code runs from top to bottom, and prints lines that begin as those that are committed."""
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    code = "\n".join("".join(cell["source"]) + '\nprint("---")' for cell in cells)
    (tmp_path / "cells.py").write_text(code)
    done = python(tmp_path / "cells.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    printed = [part.split("\n") for part in done.stdout.split("---\n")][:-1]
    assert len(printed) == len(cells)
    for cell, lines in zip(cells, printed, strict=True):
        shown = "".join(text for output in cell["outputs"] for text in output["text"]).split("\n")
        # Numbers may differ in their last digits on another processor.
        assert [line[:10] for line in lines] == [line[:10] for line in shown]
