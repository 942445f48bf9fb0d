"""Runs that would train nothing, or die in the middle, by what their prompts and responses are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.run_results import Messages

import trimtab
from trimtab.errors import TrimtabError
from trimtab.runs.directory import read_metrics
from trimtab.runs.layout import list_checkpoints
from trimtab.trainer.config import load_config
from trimtab.trainer.run import train

pytestmark = pytest.mark.e2e

SMALL = ("trainer.prompts=2", "trainer.samples=4", "eval.problems=4", "checkpoint.every=0", "log.trajectories_every=0")


def problems(path: Path, lengths: list[int], first: int) -> Path:
    """Digits to sort, so many of them in each question; the laboratory model reads 64 characters at most."""
    digits = ["".join(str((start + place) % 10) for place in range(n)) for start, n in enumerate(lengths, start=first)]
    rows = [{"question": f"{text}=", "answer": "".join(sorted(text)) + "."} for text in digits]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sorting(folder: Path, train_lengths: list[int], test_lengths: list[int], *changes: str) -> trimtab.Config:
    """The laboratory on files of its own task. Of the context of 64, 11 tokens are for responses: 53 are left."""
    files = problems(folder / "train.jsonl", train_lengths, 0), problems(folder / "test.jsonl", test_lengths, 5)
    named = [f'task={{name="file", style="plain", template="{{question}}", path="{files[0]}", test_path="{files[1]}"}}']
    return load_config("laboratory", [*SMALL, *named, "sampling.max_tokens=11", *changes])


def test_a_prompt_longer_than_the_context_is_left_out_and_counted(tmp_path: Path) -> None:
    notes = Messages()
    config = sorting(tmp_path, [10, 10, 70, 10], [10, 80, 10, 90], "trainer.steps=4")
    train(config, out=tmp_path / "run", observer=notes)
    assert (
        "2 of 4 held-out problems of test do not fit the context with their response: they count as not solved"
        in notes.lines
    )
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    # Eight prompts were drawn, each of four twice.
    assert sum(row.get("prompt/dropped", 0) for row in rows) == 2
    assert all(row["trajectories/consumed"] == 8 for row in rows)
    assert rows[-1]["eval/test/greedy"] <= 0.5


def test_a_run_whose_prompts_are_all_too_long_stops_before_it_begins(tmp_path: Path) -> None:
    with pytest.raises(TrimtabError, match="no training problem has a prompt of at most 5 tokens"):
        train(sorting(tmp_path, [10, 12], [10], "sampling.max_prompt_tokens=5"), out=tmp_path / "run")
    assert not (tmp_path / "run" / "config.toml").exists()


def test_a_recipe_that_trains_several_runs_is_for_the_command_line(tmp_path: Path) -> None:
    with pytest.raises(
        TrimtabError, match=r"has a \[compare\] section, which trains several runs: use `trimtab train`"
    ):
        trimtab.train("quickstart-stale", out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_that_learns_nothing_stops_and_resuming_it_goes_on_counting(tmp_path: Path) -> None:
    changes = [*SMALL, "sampling.max_tokens=1", "trainer.steps=9", "trainer.max_idle_steps=3"]
    notes, run = Messages(), tmp_path / "run"
    with pytest.raises(TrimtabError, match=r"3 steps in a row .* no response ended .* = 1, .*; step 3 is saved"):
        train(load_config("laboratory", changes), out=run, observer=notes)
    assert [line.partition(": no ")[0] for line in notes.lines if "no training signal" in line] == ["step 1"]
    assert [folder.name for folder in list_checkpoints(run / "checkpoints")] == ["step-000003"]
    with pytest.raises(TrimtabError, match="4 steps in a row had no training signal"):
        train(load_config("laboratory", changes), out=run, resume=True)
    patient = load_config("laboratory", [*changes, "trainer.max_idle_steps=0"])
    assert train(patient, out=run, resume=True).metrics["step"] == 9


def test_the_last_step_of_a_run_is_not_cut_off(tmp_path: Path) -> None:
    config = load_config("laboratory", [*SMALL, "sampling.max_tokens=1", "trainer.steps=2", "trainer.max_idle_steps=2"])
    assert train(config, out=tmp_path / "run").metrics["step"] == 2


def test_training_from_python_reports_its_progress_unless_disabled(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = load_config("laboratory", [*SMALL, "trainer.steps=2"])
    trimtab.train(config, out=tmp_path / "printed")
    out, errors = capfd.readouterr()
    assert out == ""
    lines = errors.splitlines()
    assert lines[0] == "loading    laboratory"
    assert [line.split()[1] for line in lines if line.startswith("step ")] == ["1/2", "2/2"]
    assert lines[-1] == f"report: {tmp_path / 'printed' / 'report.html'}"
    trimtab.train(config, out=tmp_path / "silent", progress=False)
    assert capfd.readouterr() == ("", "")
    notes = Messages()
    trimtab.train(config, out=tmp_path / "observed", observer=notes)
    assert capfd.readouterr() == ("", "")
    assert notes.lines
