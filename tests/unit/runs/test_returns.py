"""Which steps of a run count after returns to earlier policies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trimtab.runs.reader import Run
from trimtab.runs.returns import Return, kept_rows, returns_of


def rows(*returns: tuple[int, int], last: int = 12) -> list[dict[str, Any]]:
    starts = dict(returns)
    first = {"eval/sort/before": 0.25, "eval/sort/greedy": 0.5}
    marked = [{"step": step} | ({"guard/continues_from": starts[step]} if step in starts else {}) for step in starts]
    marks = {row["step"]: row for row in marked}
    return [
        {"step": step}
        | marks.get(step, {})
        | (first if step == 1 else {})
        | ({"eval/sort/greedy": 0.75} if step == last else {})
        for step in range(1, last + 1)
    ]


def test_steps_after_the_one_that_is_gone_on_from_do_not_count() -> None:
    numbers = [row["step"] for row in kept_rows(rows((8, 3), (11, 8)))]
    assert numbers == [1, 2, 3, 8, 11, 12]
    assert returns_of(rows((8, 3), (11, 8))) == [Return(8, 3), Return(11, 8)]
    assert kept_rows(rows()) == rows()


def test_a_later_return_may_go_back_before_an_earlier_one() -> None:
    assert [row["step"] for row in kept_rows(rows((8, 3), (11, 2)))] == [1, 2, 11, 12]


def test_the_accuracy_before_training_stays_where_the_first_step_was_discarded() -> None:
    run = Run(Path("run"), {"trainer": {"steps": 6}, "eval": {"every": 12}}, rows((7, 0)))
    assert run.steps == 6
    accuracy = run.kept.accuracy()["sort"]
    assert (accuracy.steps.tolist(), accuracy.values.tolist()) == ([0, 12], [0.25, 0.75])
