"""Values and coroutines that would hang or end a run: converted in the thread of the call, in its time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from decimal import Decimal
from typing import Any, Literal

import numpy as np
import pytest
import torch
from tests.unit.trainer.environments.test_broken_environments import Tools, finished, saying
from tests.unit.trainer.environments.test_episodes import LIMITS, Counter, answer, append, start, text_of

from trimtab.trainer.environments import environment
from trimtab.trainer.environments.background import EnvironmentFailed, in_background
from trimtab.trainer.environments.formats import Call, ToolError

SHORT = LIMITS.model_copy(update={"timeout": 0.2})


class Leaving:
    """Its text ends the process."""

    def __str__(self) -> str:
        raise SystemExit(4)


class Wordless:
    def __str__(self) -> str:
        raise ValueError


class Hanging:
    """Its text never comes."""

    def __str__(self) -> str:
        threading.Event().wait()
        return ""


def nested() -> list[Any]:
    value: list[Any] = []
    for _ in range(5000):
        value = [value]
    return value


async def items() -> AsyncIterator[str]:
    yield "item"


def value_of(function: Callable[[], Any], timeout: float = 5.0) -> Any:
    call = in_background(function, timeout)
    while not call.wait(timeout):
        pass
    return call.value()


@pytest.mark.parametrize(
    ("value", "failure"),
    [
        (Leaving(), "a tool raised SystemExit: 4"),
        (Hanging(), "a tool did not return within 0.2 s (environment.timeout)"),
        (items(), "a tool returned a async_generator whose text is an address in memory: return a text or a list"),
        (map(str, [1]), "a tool returned a map whose text is an address in memory: return a text or a list"),
        (object(), "a tool returned a object whose text is an address in memory: return a text or a list"),
        ([object()], "a tool returned a object whose text is an address in memory: return a text or a list"),
        ({"key": items}, "a tool returned a function whose text is an address in memory: return a text or a list"),
    ],
)
def test_a_result_without_a_text_costs_its_episode(tokenizer: Any, value: Any, failure: str) -> None:
    episodes = start(tokenizer, saying(value), limits=SHORT)
    assert finished(episodes, append(tokenizer, None, "<echo></echo>")) == ("stop", failure)


@pytest.mark.parametrize(
    ("value", "failure"),
    [
        (Wordless(), "reset raised ValueError"),
        (nested(), "reset raised RecursionError"),
        (Leaving(), "reset raised SystemExit: 4"),
        (Hanging(), "reset did not return within 0.2 s (environment.timeout)"),
    ],
)
def test_what_reset_returns_without_a_text_costs_its_episode(tokenizer: Any, value: Any, failure: str) -> None:
    class Returns(Counter):
        def reset(self, **row: Any) -> Any:
            del row
            return value

    reason, reported = finished(start(tokenizer, Returns, limits=SHORT), append(tokenizer, None, "5"))
    assert reason == "stop"
    assert str(reported).startswith(failure)


def test_numbers_and_arrays_inside_a_result_become_json() -> None:
    value = {"diff": np.int64(5), "ok": np.bool_(False), "grid": np.eye(2), "more": [torch.tensor(1.5)]}
    assert environment.text_of(value) == '{"diff": 5, "ok": false, "grid": [[1.0, 0.0], [0.0, 1.0]], "more": [1.5]}'


def test_sets_and_other_objects_inside_a_result_have_one_text() -> None:
    """In every process: the order of a set depends on the seed of its hashes."""
    assert environment.text_of({"c", "a", "b"}) == '["a", "b", "c"]'
    assert environment.text_of([{"k": frozenset({"c", "a"})}, Decimal("1.5")]) == '[{"k": ["a", "c"]}, "1.5"]'
    assert environment.text_of(Decimal("1.5")) == "1.5"
    assert environment.text_of([np.array(["2026-11-24"], "datetime64[D]"), 1j]) == '[["2026-11-24"], "1j"]'
    assert environment.text_of({"k": {"b", "a"}, 1: 2}) == '{"k": ["a", "b"], "1": 2}'
    assert environment.text_of({frozenset("ea"), frozenset("db")}) == '[["a", "e"], ["b", "d"]]'


def test_the_text_of_a_tag_fits_parameters_by_name_and_words_with_blanks_around_them() -> None:
    class Picking:
        def pick(self, *, side: Literal["low", "high"]) -> str:
            """Picks.

            Args:
                side: which one.
            """
            return side

    assert environment.call_tool(Picking(), Call("pick", " low\n")) == "low"
    with pytest.raises(ToolError, match=r"side = .* Input should be 'low' or 'high'"):
        environment.call_tool(Picking(), Call("pick", " none "))


def test_a_coroutine_that_is_given_up_is_canceled() -> None:
    canceled = threading.Event()

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            canceled.set()

    with pytest.raises(EnvironmentFailed, match=r"did not return within 0.1 s"):
        value_of(wait, 0.1)
    assert canceled.wait(5.0)


def test_coroutines_run_after_one_that_blocks_the_event_loop(tokenizer: Any) -> None:
    release = threading.Event()

    async def block() -> None:
        release.wait()

    try:
        with pytest.raises(EnvironmentFailed, match="did not return"):
            value_of(block, 0.1)
        later = answer(
            start(tokenizer, Tools, limits=LIMITS.model_copy(update={"timeout": 1.0})),
            append(tokenizer, None, "<wait></wait>"),
        )
        assert text_of(tokenizer, later) == "<output>here</output>"
    finally:
        release.set()


def test_coroutines_share_an_event_loop_while_it_answers() -> None:
    async def running() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    async def hang() -> None:
        await asyncio.Event().wait()

    before = value_of(running)
    with pytest.raises(EnvironmentFailed):
        value_of(hang, 0.4)
    assert value_of(running) is before
