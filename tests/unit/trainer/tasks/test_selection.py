"""Training rows by mean score, and without repeated questions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from trimtab.cli import main
from trimtab.errors import TrimtabError
from trimtab.trainer import tasks

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
    assert notes[0].endswith("3 of 5 training rows have a mean score from 0.2 to 0.8, the others are left out")


def test_the_first_of_equal_questions_stays(rows: Path) -> None:
    ids, notes = train_of(rows, drop_duplicates=True)
    assert ids == ["rows-1", "rows-2", "rows-4", "rows-5"]
    assert notes == (f"{rows}: 4 of 5 training rows are kept, the others have the question of another row",)
    assert train_of(rows)[0] == [f"rows-{n}" for n in range(1, 6)]


def test_a_training_row_with_the_question_of_a_test_row_is_left_out(rows: Path) -> None:
    held_out = rows.parent / "held.jsonl"
    held_out.write_text('{"question": "FIVE plus  one", "answer": "6"}\n')
    assert "rows-4" in train_of(rows, test_path=held_out)[0]
    ids, notes = train_of(rows, test_path=held_out, drop_duplicates=True)
    assert ids == ["rows-1", "rows-2", "rows-5"]
    assert "3 of 5 training rows are kept" in notes[0]


def with_column(rows: Path, values: Sequence[object]) -> Path:
    path = rows.parent / "rated.jsonl"
    lines = [
        {"question": text, "answer": "4", "rates": {"small": value}}
        for text, value in zip(QUESTIONS, values, strict=True)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("value", [None, float("nan")])
def test_a_column_holds_the_mean_score_or_the_scores(rows: Path, value: float | None) -> None:
    path = with_column(rows, [0, 0.2, [0, 1, 1, 0], [1, 1, 1, 0.6], value])
    ids, notes = train_of(path, score_column="rates.small", score_min=0.2, score_max=0.8)
    assert ids == ["rated-2", "rated-3"]  # the fourth has a mean of .9, the fifth has none
    assert notes[0].endswith(
        "2 of 5 training rows have a mean score from 0.2 to 0.8, the others are left out (1 without a score)"
    )


def test_the_rows_of_a_test_file_need_no_score(rows: Path) -> None:
    held_out = rows.parent / "held.jsonl"
    held_out.write_text('{"question": "ten plus one", "answer": "11"}\n')
    ids, _ = train_of(with_column(rows, SCORES), test_path=held_out, score_column="rates.small", score_max=0.5)
    assert ids == ["rated-1", "rated-2", "rated-3"]


@pytest.mark.parametrize("value", [80, -0.1, "high", [], [0.5, "x"], [0.5, 2], True])
def test_what_is_no_score_is_refused(rows: Path, value: object) -> None:
    path = with_column(rows, [0.5, value, 0.5, 0.5, 0.5])
    with pytest.raises(
        TrimtabError, match=r"rated.jsonl, row 2: column 'rates.small' holds .*, not a score from 0 to 1"
    ):
        train_of(path, score_column="rates.small", score_max=0.8)


def test_scores_without_a_band_keep_every_row(rows: Path) -> None:
    ids, notes = train_of(rows, scores=rows.parent / "scores.jsonl")
    assert len(ids) == 5
    assert "5 of 5 training rows have a mean score from 0 to 1" in notes[0]


def test_test_rows_are_not_selected(rows: Path) -> None:
    task = tasks.build("file", path=rows, holdout=1.0, style="chat", drop_duplicates=True)
    assert len(task.test) == 5


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"score_min": 0.2}, "score_min and score_max need score_column, or scores: write them with `trimtab eval"),
        (
            {"score_column": "answer", "scores": "scores.jsonl", "score_min": 0.2},
            "name score_column or scores, not both",
        ),
        ({"score_column": "rate", "score_min": 0.2}, "no column 'rate' .*; set score_column = "),
        ({"scores": "wide.jsonl", "score_min": 0.2}, "wide.jsonl, row 1: 50 is not a score from 0 to 1"),
        (
            {"scores": "scores.jsonl", "score_min": 0.6, "score_max": 0.4},
            "0 of 5 training rows have a mean score from 0.6 to 0.4",
        ),
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
    (rows.parent / "wide.jsonl").write_text('{"id": "rows-1", "score": 50}\n')
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
    unsolved = [row["id"] for row in written if row["score"] <= 0.4]
    assert unsolved  # four tokens hold no boxed answer
    assert train_of(rows, scores=out, score_max=0.4)[0] == unsolved
    assert main.run(["eval", "a", "b", "--scores", str(out)]) == 2
    assert "one model on one task" in capsys.readouterr().err
