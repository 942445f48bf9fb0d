"""The reward that runs a program against its tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from trimtab.errors import TrimtabError
from trimtab.trainer import rewards
from trimtab.trainer.rewards import Response, Scorer
from trimtab.trainer.sandbox.python_pool import sandbox_unavailable
from trimtab.trainer.tasks.task import BuiltTask, Plain
from trimtab.types import Problem, RewardSpec

if missing := sandbox_unavailable("monty"):
    pytest.skip(missing, allow_module_level=True)

FREE = BuiltTask("free", [], [], Plain(), (), (), 64)


@pytest.fixture(scope="module")
def python() -> Iterator[Scorer]:
    with rewards.build([RewardSpec("python-tests", timeout=30.0, options={"seconds": 0.5})], FREE) as built:
        yield built


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


def test_the_code_has_its_place_in_a_program() -> None:
    options = {"program": "import math\nx = math.{code}"}
    problem = Problem("x", "root", "", {"tests": ["assert x == 3"]})
    with rewards.build([RewardSpec("python-tests", timeout=30.0, options=options)], FREE) as scorer:
        scores = scorer.score([(problem, Response(text, "stop", 5)) for text in ("sqrt(9)", "sqrt(4)", "3a")])
    assert [score.total for score in scores] == [1.0, 0.0, 0.0]


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
