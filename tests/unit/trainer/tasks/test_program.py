"""The task `program` and the reward that runs a program against its tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from trimtab.errors import TrimtabError
from trimtab.trainer import rewards, tasks
from trimtab.trainer.rewards import Response, Scorer
from trimtab.trainer.sandbox.python_pool import sandbox_unavailable
from trimtab.trainer.tasks.laboratory_tasks import program_problem
from trimtab.trainer.tasks.task import BuiltTask
from trimtab.trainer.tasks.templates import Plain
from trimtab.types import Problem, RewardSpec

if missing := sandbox_unavailable("monty"):
    pytest.skip(missing, allow_module_level=True)

TASK = tasks.build("program", digits=10, holdout=50)
FREE = BuiltTask("free", [], [], Plain(), (), (), 64)


@pytest.fixture(scope="module")
def scorer() -> Iterator[Scorer]:
    with rewards.build([], TASK) as built:
        yield built


@pytest.fixture(scope="module")
def python() -> Iterator[Scorer]:
    with rewards.build([RewardSpec("python-tests", timeout=30.0, options={"seconds": 0.5})], FREE) as built:
        yield built


def test_the_gold_program_is_the_run_length_code_and_runs_of_twenty_are_split() -> None:
    assert program_problem("5557700000", "x").answer == "352750."
    assert program_problem("1" * 20, "x").answer == "919121."
    assert all(len(problem.answer) <= TASK.max_tokens for problem in TASK.test)
    questions = {problem.question for problem in TASK.test}
    assert len(questions) == 50
    assert not questions & {TASK.train[index].question for index in range(500)}


def test_every_program_that_prints_the_digits_is_worth_one(scorer: Scorer) -> None:
    """55577: three 5 and two 7; each digit alone; the first 5 apart. Not: two 5; a pair cut in half; nothing; text."""
    problem = Problem("x", "55577", "3527.", {"tests": ["assert printed == '55577'"]})
    good, bad = ["3527.", "1515151717.", "152527.", "352709."], ["2527.", "352.", ".", "3a27."]
    scores = scorer.score([(problem, Response(text, "stop", 5)) for text in good + bad])
    assert [score.error for score in scores] == [None] * 8
    assert [score.total for score in scores] == [1.0] * 4 + [0.0] * 4


def test_the_gold_program_of_every_problem_passes(scorer: Scorer) -> None:
    problems = [*TASK.test[:10], *TASK.train[:10]]
    assert {score.total for score in scorer.score([(p, Response(TASK.gold(p), "stop", 9)) for p in problems])} == {1.0}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("def f(x):\n    return x * x", 1.0),
        (
            "First:\n```python\ndef f(x): return 2\n```\nBetter:\n```python\ndef f(x):\n    return x ** 2\n```\nDone.",
            1.0,
        ),
        ("def f(x):\n    return x + x", 0.0),
        ("def f(x)\n    return x * x", 0.0),
        ("def f(x):\n    while True: pass", 0.0),
        ("raise SystemExit", 0.0),
    ],
    ids=["right", "last-block", "wrong", "syntax", "endless", "exit"],
)
def test_programs_of_a_free_text(python: Scorer, text: str, value: float) -> None:
    problem = Problem("x", "square", "", {"tests": ["assert f(2) == 4", "assert f(3) == 9"]})
    (score,) = python.score([(problem, Response(text, "stop", 9))])
    assert (score.total, score.error) == (value, None)


def test_a_program_leaves_nothing_to_the_next_one(python: Scorer) -> None:
    problem = Problem("x", "square", "", {"tests": "assert f(2) == 4"})
    items = [(problem, Response(text, "stop", 9)) for text in ("def f(x): return 4", "pass")]
    assert [score.total for score in python.score(items)] == [1.0, 0.0]


def test_mistakes_are_named(python: Scorer) -> None:
    (score,) = python.score([(Problem("x", "q", "a"), Response("pass", "stop", 1))])
    assert score.total is None
    assert "the problem has no 'tests'; name the column in the task's extra" in str(score.error)
    with pytest.raises(TrimtabError, match=r"program: write \{code\} where the code of the response belongs"):
        rewards.build([RewardSpec("python-tests", options={"program": "pass"})], FREE)
    with pytest.raises(TrimtabError, match=r"python-tests.*cannot import packages \(numpy\)"):
        rewards.build([RewardSpec("python-tests", options={"packages": ("numpy",)})], FREE)
