"""Reading run files: what is there is read exactly, what is broken is named in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trimtab.errors import TrimtabError
from trimtab.runs.reader import Return, Run, read_run


def _metrics(run: Path, *rows: dict[str, object]) -> None:
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_series_skips_steps_that_did_not_log_a_number(run: Path) -> None:
    _metrics(
        run, {"step": 1, "a": 0.5}, {"step": 2, "a": None}, {"step": 3}, {"step": 4, "a": "word"}, {"step": 5, "a": 2}
    )
    steps, values = read_run(run).series("a")
    assert steps.tolist() == [1, 5]
    assert values.tolist() == [0.5, 2.0]


@pytest.mark.parametrize(
    ("first", "more", "curve"),
    [
        ({"greedy": 0.25, "before": 0.25}, [{"step": 2}, {"step": 3, "eval/sort/greedy": 0.75}], {0: 0.25, 3: 0.75}),
        ({"greedy": 0.5, "before": 0.25}, [], {0: 0.25, 1: 0.5}),
        ({"greedy": 0.5}, [], {1: 0.5}),
    ],
)
def test_accuracy_starts_at_step_zero_with_the_value_before_training(
    run: Path, first: dict[str, float], more: list[dict[str, object]], curve: dict[int, float]
) -> None:
    _metrics(run, {"step": 1, **{f"eval/sort/{name}": value for name, value in first.items()}}, *more)
    result = read_run(run).accuracy()["sort"]
    assert dict(zip(result.steps.tolist(), result.values.tolist(), strict=True)) == curve
    assert (result.before, result.after) == (curve.get(0), curve[max(curve)])


@pytest.mark.parametrize(("every", "steps", "after"), [(0, 1, 0.25), (1, 9, 0.25), (2, 9, None), (0, 9, None)])
def test_an_accuracy_that_did_not_change_in_the_first_step(
    run: Path, every: int, steps: int, after: float | None
) -> None:
    (run / "config.toml").write_text(f"[eval]\nevery = {every}\n[trainer]\nsteps = {steps}\n")
    _metrics(run, {"step": 1, "eval/sort/greedy": 0.25, "eval/sort/before": 0.25})
    result = read_run(run).accuracy()["sort"]
    assert (result.before, result.after) == (0.25, after)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.toml", None, "config.toml is missing"),
        ("config.toml", "seed = \n", "config.toml is damaged"),
        ("metrics.jsonl", None, "metrics.jsonl is missing"),
        ("metrics.jsonl", "", "metrics.jsonl is empty"),
        ("metrics.jsonl", '{"step": 1', "metrics.jsonl holds no finished step"),
        ("metrics.jsonl", '{"reward/mean": 1}\n', "metrics.jsonl, line 1"),
    ],
)
def test_damage_is_named_in_one_line(run: Path, name: str, content: str | None, words: str) -> None:
    (run / name).unlink()
    if content is not None:
        (run / name).write_text(content)
    with pytest.raises(TrimtabError) as error:
        read_run(run)
    assert "\n" not in str(error.value)
    assert str(run) in str(error.value)
    assert words in str(error.value)
    with pytest.raises(TrimtabError, match=r"no run directory .*absent"):
        read_run(run / "absent")


def returning(*returns: tuple[int, int]) -> Run:
    rows: list[dict[str, float]] = [{"step": step} for step in range(1, 13)]
    rows[0] |= {"eval/sort/before": 0.25, "eval/sort/greedy": 0.5}
    rows[-1] |= {"eval/sort/greedy": 0.75}
    for step, start in returns:
        rows[step - 1] |= {"guard/continues_from": start}
    return Run(Path("run"), {"trainer": {"steps": 6}, "eval": {"every": 12}}, rows)


def test_steps_after_the_one_that_is_gone_on_from_do_not_count() -> None:
    run = returning((8, 3), (11, 8))
    assert [row["step"] for row in run.kept.rows] == [1, 2, 3, 8, 11, 12]
    assert run.discarded == [(4, 7), (9, 10)]
    assert run.returns == [Return(8, 3), Return(11, 8)]
    assert returning().kept.rows == returning().rows
    # A later return may go back before an earlier one.
    assert [row["step"] for row in returning((8, 3), (11, 2)).kept.rows] == [1, 2, 11, 12]


def test_the_accuracy_before_training_stays_where_the_first_step_was_discarded() -> None:
    run = returning((7, 0))
    assert run.steps == 6
    accuracy = run.kept.accuracy()["sort"]
    assert (accuracy.steps.tolist(), accuracy.values.tolist()) == ([0, 12], [0.25, 0.75])
