"""The environment "python": its options reach the sandbox."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from typing import Any

import psutil
import pytest

from trimtab.errors import TrimtabError
from trimtab.trainer.config import EnvironmentConfig
from trimtab.trainer.environments import build
from trimtab.trainer.environments.background import EnvironmentFailed
from trimtab.trainer.environments.formats import ToolError
from trimtab.trainer.sandbox.python_pool import SandboxName

pytestmark = pytest.mark.e2e

SECONDS = 20.0  # of one call, on a machine that does other work

Episode = Callable[..., list[str]]
Run = Callable[..., Episode]


def spec(sandbox: SandboxName, **options: Any) -> EnvironmentConfig:
    keywords = {"sandbox": sandbox, "seconds": SECONDS, "workers": 1, **options}
    return EnvironmentConfig(name="python", timeout=SECONDS + 5, **keywords)


def result_of(environment: Any, code: str) -> str:
    try:
        return environment.python(code)
    except ToolError as error:
        return str(error)


@pytest.fixture
def environment(sandbox: SandboxName) -> Iterator[Run]:
    """Builds the environment with some options; returns a function that runs calls of one episode."""
    with ExitStack() as stack:

        def built(**options: Any) -> Episode:
            made = build(spec(sandbox, **options))
            stack.callback(made.close)

            def episode(*calls: str) -> list[str]:
                one = made.factory()
                one.reset(id="p", question="?", answer="!")
                try:
                    return [result_of(one, code) for code in calls]
                finally:
                    one.close()

            return episode

        yield built


def test_variables_live_on_in_an_episode_and_not_in_the_next(environment: Run) -> None:
    episode = environment(stateful=True)
    assert episode("x = 6", "x * 7") == ["", "42"]
    [result] = episode("x * 7")
    assert "NameError" in result


@pytest.mark.parametrize("options", [{}, {"stateful": False}])
def test_without_state_every_call_begins_anew(environment: Run, options: dict[str, Any]) -> None:
    first, result = environment(**options)("x = 6", "x * 7")
    assert first == ""
    assert "NameError" in result


def test_a_second_reset_begins_another_episode(sandbox: SandboxName) -> None:
    made = build(spec(sandbox, stateful=True))
    try:
        one = made.factory()
        one.reset(id="p")
        assert one.python("x = 6") == ""
        one.reset(id="p")
        assert "NameError" in result_of(one, "x")
        one.close()
    finally:
        made.close()


def test_the_result_is_what_was_printed_and_then_the_error(environment: Run) -> None:
    [result] = environment()("print('six')\n1 / 0")
    assert result.startswith("six\nTraceback")
    assert result.endswith("ZeroDivisionError: division by zero")


def test_limits_of_a_call(environment: Run) -> None:
    assert environment(seconds=1.0)("while True: pass") == ["took longer than 1 s"]
    [result] = environment(max_output=100)("for _ in range(1000): print('x' * 10)")
    assert result.endswith("printed more than 100 characters")
    [result] = environment(memory_mb=32)("x = []\nwhile True: x.append('a' * 1000)")
    assert "MemoryError" in result or "used more than 32 MB" in result


def test_a_killed_sandbox_costs_its_episode(sandbox: SandboxName) -> None:
    before, made = set(psutil.Process().children()), build(spec(sandbox))
    with closing(made), ThreadPoolExecutor(1) as thread:
        run = thread.submit(made.factory().python, "while True: pass")
        while not run.done():  # once may be before the run has begun
            for process in set(psutil.Process().children()) - before:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        with pytest.raises(EnvironmentFailed, match=r"^failed: .*sandbox"):
            run.result()


def test_packages_can_be_imported(sandbox: SandboxName, environment: Run) -> None:
    if sandbox == "monty":
        with pytest.raises(TrimtabError, match="bubblewrap"):
            environment(packages=["packaging"])
        return
    code = "import packaging\npackaging.__name__"
    assert environment(packages=["packaging"])(code) == ["'packaging'"]
    [result] = environment()(code)
    assert "ModuleNotFoundError" in result


def test_a_sandbox_without_time_to_end_a_call_is_refused() -> None:
    with pytest.raises(TrimtabError, match=r"environment\.timeout = 10 s is below 11 s"):
        build(EnvironmentConfig(name="python", timeout=10.0, seconds=6.0))
