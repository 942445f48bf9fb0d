"""What models and environments may do that must not end a run, or make it wait: odd results, errors, arguments."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from decimal import Decimal
from typing import Any, Literal

import numpy as np
import pytest
import torch
from tests.unit.trainer.environments.test_episodes import (
    LIMITS,
    Counter,
    answer,
    append,
    encode,
    finished,
    start,
    text_of,
)

import trimtab
from trimtab.errors import TrimtabError
from trimtab.trainer.environments import environment
from trimtab.trainer.environments.background import EnvironmentFailed, in_background
from trimtab.trainer.environments.environment import call_tool, check_class, tool_names
from trimtab.trainer.environments.formats import CUT, Call, ToolError
from trimtab.types import Problem

ROWS = Problem("p1", "How much?", "3", {"rows": [1, 2]})


class Tools:
    """`echo` returns or raises what the test says; the others differ in their arguments."""

    says: Any = ""

    def reset(self, **row: Any) -> None: ...

    def echo(self) -> Any:
        """Returns."""
        if isinstance(self.says, BaseException):
            raise self.says
        return self.says

    def numbers(self, values: list[int], scale: float | None = None) -> str:
        """Shows.

        Args:
            values: any number of them.
            scale: one.
        """
        return f"{values} {scale}"

    def exit(self) -> None:
        """Ends the process it runs in."""
        raise SystemExit(2)

    async def leave(self) -> None:
        """Ends the process it runs in, from a coroutine."""
        raise SystemExit(3)

    async def wait(self) -> str:
        """Returns, from a coroutine."""
        return "here"


def saying(value: Any) -> type[Tools]:
    return type("Saying", (Tools,), {"says": value})


def observation(tokenizer: Any, says: Any, limit: int = 100) -> str:
    episodes = start(
        tokenizer, saying(says), limits=LIMITS.model_copy(update={"max_observation_tokens": limit}), max_tokens=2000
    )
    return text_of(tokenizer, answer(episodes, append(tokenizer, None, "<echo></echo>")))


class Later:
    """An awaitable that is not a coroutine."""

    def __await__(self) -> Iterator[Any]:
        yield from asyncio.sleep(0).__await__()
        return "here"


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError


@pytest.mark.parametrize(
    ("says", "text"),
    [
        ("".join(map(chr, range(0xE000, 0xE010))), "".join(map(chr, range(0xE000, 0xE010)))),
        ("\ue000\ue000<|im_end|>\ue000", "\ue000\ue000<|im_end|>\ue000"),
        ("half \ud800 a pair", "half \\ud800 a pair"),
        ({"text": "\udcff"}, '{"text": "\\udcff"}'),
        (ValueError("<|im_end|>\ud800"), "Error: ValueError: <|im_end|>\\ud800"),
        (ValueError(), "Error: ValueError"),
        (Later(), "here"),
        (Unprintable(), "Error: Unprintable"),
    ],
)
def test_any_result_can_be_shown(tokenizer: Any, says: Any, text: str) -> None:
    assert observation(tokenizer, says) == f"<output>{text}</output>"


@pytest.mark.parametrize("says", ["<|im_end|>" * 30, "word " * 10**7, "<|im_end|>" * 10**6])
def test_no_result_is_longer_than_its_bound(tokenizer: Any, says: str) -> None:
    """Ten million words would take ten seconds to encode; a special token is several tokens of text."""
    ids = tokenizer(text := observation(tokenizer, says, 20), add_special_tokens=False, split_special_tokens=True)
    around = len(tokenizer(f"<output>{CUT}</output>")["input_ids"])
    assert len(ids["input_ids"]) <= 20 + around + 2  # tokens may merge or split where parts meet
    assert CUT in text
    assert text.startswith(f"<output>{says[:4]}")
    assert text.endswith(f"{says[-2:]}</output>")


@pytest.mark.parametrize(
    ("turn", "failure"),
    [("<exit></exit>", "a tool raised SystemExit: 2"), ("<leave></leave>", "a tool raised SystemExit: 3")],
)
def test_a_tool_that_ends_its_process_costs_its_episode(tokenizer: Any, turn: str, failure: str) -> None:
    assert finished(start(tokenizer, Tools), append(tokenizer, None, turn)) == ("stop", failure)


class OddFormat:
    """Parses a turn as it is told, and renders by raising; an exception is raised."""

    stop = ("!",)

    def __init__(self, parsed: Any, rendered: BaseException | None = None) -> None:
        self._parsed, self._rendered = parsed, rendered

    def parse(self, text: str) -> Any:
        del text
        if isinstance(self._parsed, BaseException):
            raise self._parsed
        return self._parsed

    def render(self, result: str) -> str:
        raise self._rendered or KeyError(result)


@pytest.mark.parametrize(
    ("parsed", "failure"),
    [
        (IndexError("no call"), "parse() of the format raised IndexError: no call"),
        (Call("echo", ""), "render() of the format raised KeyError: ''"),
    ],
)
def test_a_format_that_fails_costs_its_episode(tokenizer: Any, parsed: Any, failure: str) -> None:
    reason, said = finished(start(tokenizer, Tools, form=OddFormat(parsed)), append(tokenizer, None, "a!"))
    assert reason == "stop"
    assert str(said).startswith(failure)


def test_a_format_that_cannot_be_used_ends_the_run(tokenizer: Any) -> None:
    turn = append(tokenizer, None, "a!")
    refused = TrimtabError("this template cannot be continued")
    with pytest.raises(TrimtabError, match="cannot be continued"):
        answer(start(tokenizer, Tools, form=OddFormat(Call("echo", ""), refused)), turn)


def test_a_constructor_that_raises_costs_its_episode(tokenizer: Any) -> None:
    numbers = iter(range(2))

    class Second(Tools):
        def __init__(self) -> None:
            if next(numbers) == 0:
                raise OSError("no connection")

    episodes, turn = start(tokenizer, Second), append(tokenizer, None, "5")
    [group] = episodes.finish([[turn, turn]])
    assert [one.outcome.failure for one in group] == ["the constructor raised OSError: no connection", None]
    episodes.close()


def test_a_prompt_that_reset_makes_too_long_costs_its_episode(tokenizer: Any) -> None:
    texts = iter([" Begin.", " word" * 30])

    class Begins(Counter):
        def reset(self, **row: Any) -> str:
            super().reset(**row)
            return next(texts)

    problem = Problem("p1", "How much?", "3")
    length = len(encode(replace(problem, question=problem.question + " word" * 30), tokenizer).ids)
    episodes = start(tokenizer, Begins, problems=[problem], max_prompt=length - 1)
    assert sorted(len(prompt.text) for prompt in episodes.prompts) == [27, 34]
    turn = append(tokenizer, None, "5")
    [group] = episodes.finish([[turn], [turn]])
    line = f"makes a prompt of {length} tokens, and the context holds {length - 1} besides max_tokens = 200"
    assert sorted(line in str(one.outcome.failure) for one in group) == [False, True]
    assert None in {one.outcome.failure for one in group}


def test_an_environment_that_changes_its_row_changes_no_other(tokenizer: Any) -> None:
    seen: list[list[int]] = []

    class Empties(Counter):
        def reset(self, **row: Any) -> None:
            seen.append(list(row["rows"]))
            row["rows"].clear()

    for _ in range(2):
        start(tokenizer, Empties, problems=[ROWS, ROWS])
    assert seen == [[1, 2]] * 8


@pytest.mark.parametrize(
    ("get_reward", "said"),
    [
        (lambda _: float("nan"), "returned nan, not a finite number"),
        (lambda _: None, "returned NoneType, not a number"),
        (lambda _: "1.0", "returned str, not a number"),
        (lambda _: -1e308, "returned -1e+308, above 1e+18"),
        (lambda _: {}["disk"], "raised KeyError: 'disk'"),
    ],
)
def test_an_unusable_reward_costs_its_episode(tokenizer: Any, get_reward: Callable[..., Any], said: str) -> None:
    kind = type("Odd", (Counter,), {"get_reward": get_reward})
    failure = finished(start(tokenizer, kind), append(tokenizer, None, "5"))[1]
    assert failure == f"get_reward {said}"


@pytest.mark.parametrize(
    ("arguments", "result"),
    [
        ("[1, 2]", "[1, 2] None"),
        ({"values": [1, "2"]}, "[1, 2] None"),
        ({"values": [], "scale": "3"}, "[] 3.0"),
        ({"values": [], "scale": None}, "[] None"),
    ],
)
def test_arguments_that_fit(arguments: Any, result: str) -> None:
    assert call_tool(Tools(), Call("numbers", arguments)) == result


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("three", 'numbers: values = "three": Input should be a valid list'),
        ({"values": [1, "x"]}, 'numbers: values.1 = "x": Input should be a valid integer'),
        ({"values": {}}, "numbers: values = {}: Input should be a valid list"),
        ({}, "numbers: missing a required argument: 'values'"),
        ({"values": [], "by": 2}, "numbers: got an unexpected keyword argument 'by'"),
    ],
)
def test_arguments_that_do_not_fit_are_one_line(arguments: Any, line: str) -> None:
    with pytest.raises(ToolError, match=f"^{re.escape(line)}[^\n]*$"):
        call_tool(Tools(), Call("numbers", arguments))


def test_what_an_instance_holds_is_not_a_tool() -> None:
    """Neither is it shown to the model, nor may it be called; a property is not evaluated."""

    class Holding(Tools):
        def __init__(self) -> None:
            self.solve = lambda: "the solution"

        @property
        def broken(self) -> str:
            raise OSError

    names = tool_names(Holding)
    assert "solve" not in names
    with pytest.raises(ToolError, match="there is no tool 'solve'; there are: echo, exit, leave, numbers, wait"):
        call_tool(Holding(), Call("solve", ""))
    assert call_tool(Holding(), Call("echo", "")) == ""


def test_only_functions_of_a_class_are_tools() -> None:
    class Mixed(Tools):
        parser = int

        class Config:
            pass

        @staticmethod
        def twice(text: str) -> str:
            """Repeats.

            Args:
                text: what is repeated.
            """
            return text * 2

    check_class(Mixed, "Mixed")
    assert tool_names(Mixed) == ["echo", "exit", "leave", "numbers", "twice", "wait"]
    assert call_tool(Mixed(), Call("twice", "ab")) == "abab"


def nothing(self: Any) -> None: ...
def question(self: Any, question: str) -> None: ...
def by_position(self: Any, id: str, question: str, answer: str, /) -> None: ...
def whole(self: Any, id: str, question: str, answer: str) -> None: ...
def level(self: Any, level: int, **row: Any) -> None: ...
def row(self: Any, **row: Any) -> None: ...


@pytest.mark.parametrize("reset", [nothing, question, by_position])
def test_reset_that_does_not_take_a_row_is_refused(reset: Any) -> None:
    message = r"environment 'Broken': reset does not take .*'id'.*: write reset\(self, \*\*row\)"
    with pytest.raises(TrimtabError, match=message):
        check_class(type("Broken", (Tools,), {"reset": reset}), "Broken")


@pytest.mark.parametrize("reset", [whole, level, row, classmethod(row)])
def test_reset_that_takes_a_row_is_accepted(reset: Any) -> None:
    check_class(type("Good", (Tools,), {"reset": reset}), "Good")


def test_an_instance_in_place_of_the_class_is_refused() -> None:
    with pytest.raises(TrimtabError, match=r"^environment is a class, not an instance of Tools$"):
        trimtab.train("laboratory", environment=Tools())  # pyright: ignore[reportArgumentType]


SHORT = LIMITS.model_copy(update={"timeout": 0.2})


class Leaving:
    """Its text ends the process."""

    def __str__(self) -> str:
        raise SystemExit(4)


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
        (Unprintable(), "reset raised ValueError"),
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


def test_arrays_and_numbers_inside_a_result_become_json() -> None:
    value = {"diff": np.int64(5), "ok": np.bool_(False), "grid": np.eye(2), "more": [torch.tensor(1.5)]}
    assert environment.text_of(value) == '{"diff": 5, "ok": false, "grid": [[1.0, 0.0], [0.0, 1.0]], "more": [1.5]}'
    values = {"[1, 2]": np.array([1, 2]), "[[1.0]]": np.eye(1), "0.1": np.float32(0.1), "1.5": np.array(1.5)}
    assert [environment.text_of(value) for value in values.values()] == [*values]


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
