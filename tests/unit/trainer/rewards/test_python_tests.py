"""The reward that runs a program against its tests."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import psutil
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
        ("Calls:\n```text\nf(2)\n```\n```Python\ndef f(x): return x * x\n```\nRun:\n```bash\npython f.py\n```", 1.0),
        ("Text:\n```text\nf(2)\n```\n````\ndef f(x): return x * x\n````", 1.0),
        ("```f(2)``` does this:\n```python\ndef f(x): return x * x\n```\n```pycon\n>>> f(2)\n4\n```", 1.0),
        ("def f(x):\n    return x + x", 0.0),
        ("def f(x)\n    return x * x", 0.0),
        ("def f(x):\n    while True: pass", 0.0),
        ("raise SystemExit", 0.0),
    ],
    ids=["right", "last-block", "languages", "untagged", "inline", "wrong", "syntax", "endless", "exit"],
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


@pytest.mark.parametrize("killed", ["worker", "interpreter"])
def test_a_killed_sandbox_is_a_failure_and_not_a_wrong_answer(killed: str) -> None:
    """The code cannot end these processes: it has no access to any."""
    problem = Problem("x", "square", "", {"tests": "assert f(2) == 4"})
    items = [(problem, Response(text, "stop", 9)) for text in ("while True: pass", "def f(x): return x * x")]
    spec = RewardSpec("python-tests", timeout=60.0, options={"seconds": 30.0})
    others = set(psutil.Process().children(recursive=True))  # such as those of `python`
    with rewards.build([spec], FREE) as scorer, ThreadPoolExecutor(1) as thread:
        assert scorer.score(items[1:])[0].total == 1.0  # starts the sandbox
        scoring = thread.submit(scorer.score, items)
        while not (busy := [p for p in {*psutil.Process().children(recursive=True)} - others if is_busy(p)]):
            time.sleep(0.05)
        process = busy[0] if killed == "interpreter" else busy[0].parent()
        assert process is not None
        process.kill()
        failed, passed = scoring.result()
    assert failed.total is None
    assert "raised RuntimeError: the sandbox failed" in str(failed.error)
    assert passed.total == 1.0


def is_busy(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.name() == "monty" and sum(process.cpu_times()[:2]) > 0.3
    return False


@pytest.mark.parametrize("text", ["x = [1]\nwhile True: x = x + x", "while True: print('x' * 1000)"])
def test_a_limit_that_the_code_exceeds_is_a_wrong_answer(python: Scorer, text: str) -> None:
    (score,) = python.score([(Problem("x", "q", "", {"tests": "pass"}), Response(text, "stop", 9))])
    assert (score.total, score.error) == (0.0, None)


def test_mistakes_are_named(python: Scorer) -> None:
    (score,) = python.score([(Problem("x", "q", "a"), Response("pass", "stop", 1))])
    assert score.total is None
    assert "the problem has no 'tests'; name the column in the task's extra" in str(score.error)
    with pytest.raises(TrimtabError, match=r"program: write \{code\} where the code of the response belongs"):
        rewards.build([RewardSpec("python-tests", options={"program": "pass"})], FREE)
    with pytest.raises(TrimtabError, match=r"python-tests.*cannot import packages \(numpy\)"):
        rewards.build([RewardSpec("python-tests", options={"packages": ("numpy",)})], FREE)
