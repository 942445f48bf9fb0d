"""Training rows by mean score, and without repeated questions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trimtab import tasks
from trimtab.cli import main
from trimtab.errors import TrimtabError

QUESTIONS = ["two plus two", "three  plus one", "Two Plus two", "five plus one", "six plus one"]
SCORES = [0.0, 0.2, 0.5, 0.8, 1.0]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"question": text, "answer": "4"}) + "\n" for text in QUESTIONS))
    scores = [{"id": f"rows-{n}", "score": score} for n, score in enumerate(SCORES, start=1)]
    (tmp_path / "scores.jsonl").write_text("".join(json.dumps(row) + "\n" for row in scores))
    return path


def train_of(path: Path, **options: object) -> tuple[list[str], tuple[str, ...]]:
    task = tasks.build("file", path=path, holdout=0.0, style="chat", **options)
    return [problem.id for problem in task.train], tuple(task.notes)


def test_the_band_includes_its_bounds(rows: Path) -> None:
    ids, notes = train_of(rows, scores=rows.parent / "scores.jsonl", score_min=0.2, score_max=0.8)
    assert ids == ["rows-2", "rows-3", "rows-4"]
    assert notes[0].endswith("3 of 5 rows have a mean score from 0.2 to 0.8, the others are left out")


def test_the_first_of_equal_questions_stays(rows: Path) -> None:
    ids, notes = train_of(rows, drop_duplicates=True)
    assert ids == ["rows-1", "rows-2", "rows-4", "rows-5"]
    assert notes[0].endswith("1 rows with the question of an earlier one are left out")
    assert train_of(rows)[0] == [f"rows-{n}" for n in range(1, 6)]


def test_test_rows_are_not_selected(rows: Path) -> None:
    task = tasks.build("file", path=rows, holdout=1.0, style="chat", drop_duplicates=True)
    assert len(task.test) == 5


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"score_min": 0.2}, "score_min and score_max need scores: write them with `trimtab eval"),
        ({"scores": "scores.jsonl"}, "scores has no effect without score_min or score_max"),
        ({"scores": "scores.jsonl", "score_min": 0.6, "score_max": 0.4}, "score_min = 0.6 is above score_max = 0.4"),
        ({"scores": "scores.jsonl", "score_min": 0.6, "score_max": 0.7}, "no training row is left"),
        ({"scores": "absent.jsonl", "score_min": 0.6}, "cannot read .*absent.jsonl"),
        ({"scores": "rows.jsonl", "score_min": 0.6}, "rows.jsonl, row 1: not ."),
        ({"scores": "few.jsonl", "score_min": 0.6}, "has no score of row 'rows-2'"),
    ],
)
def test_mistakes_are_one_line(
    rows: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, object], line: str
) -> None:
    monkeypatch.chdir(rows.parent)
    (rows.parent / "few.jsonl").write_text('{"id": "rows-1", "score": 1}\n')
    with pytest.raises(TrimtabError, match=line):
        train_of(rows, **options)


@pytest.mark.e2e
def test_an_evaluation_writes_the_scores(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = rows.parent / "measured.jsonl"
    task = f"file:path={rows},holdout=1,style=chat,max_tokens=4"
    assert main.run(["eval", "smollm2-135m-instruct", "--task", task, "--samples", "2", "--scores", str(out)]) == 0
    capsys.readouterr()
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["id"] for row in written] == [f"rows-{n}" for n in range(1, 6)]
    assert all(row["score"] in (0.0, 0.5, 1.0) for row in written)
    assert main.run(["eval", "a", "b", "--scores", str(out)]) == 2
    assert "one model on one task" in capsys.readouterr().err
