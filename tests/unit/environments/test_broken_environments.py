"""What models and environments may do that must not end a run: odd results, errors, arguments and formats."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.environments.test_episodes import LIMITS, Counter, answer, append, encode, start, text_of
from transformers import AutoTokenizer

import trimtab
from trimtab.environments.environment import call_tool, check_class, tool_names
from trimtab.environments.episodes import EpisodeRunner
from trimtab.environments.formats import Call, Tag, ToolError
from trimtab.environments.result_encoder import CUT
from trimtab.errors import TrimtabError
from trimtab.models import bundled
from trimtab.types import FinishReason, Problem

ROWS = Problem("p1", "How much?", "3", {"rows": [1, 2]})


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    result = AutoTokenizer.from_pretrained(bundled.folder())
    result.__deepcopy__ = lambda _: result
    return result


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

    async def leave(self) -> None:
        """Ends the process it runs in, from a coroutine."""
        raise SystemExit(3)

    async def wait(self) -> str:
        """Returns, from a coroutine."""
        return "here"


def saying(value: Any) -> type[Tools]:
    return type("Saying", (Tools,), {"says": value})


def observation(tokenizer: Any, says: Any, limit: int = 100) -> str:
    episodes = start(tokenizer, saying(says), limits=replace(LIMITS, observation_tokens=limit), max_tokens=2000)
    return text_of(tokenizer, answer(episodes, append(tokenizer, None, "<echo></echo>")))


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


def finished(episodes: Any, turn: Any) -> tuple[FinishReason | None, str | None]:
    reason = answer(episodes, turn).finish_reason
    [[one, _]] = episodes.finish([[turn, turn]])
    assert one.outcome is not None
    return reason, one.outcome.failure


def test_a_coroutine_that_ends_its_process_costs_its_episode(tokenizer: Any) -> None:
    assert finished(start(tokenizer, Tools), append(tokenizer, None, "<leave></leave>")) == (
        "stop",
        "a tool raised SystemExit: 3",
    )
    later = answer(start(tokenizer, Tools), append(tokenizer, None, "<wait></wait>"))
    assert text_of(tokenizer, later) == "<output>here</output>"


class BrokenFormat:
    """Calls `echo`; raises where it is asked to."""

    stop = ("!",)

    def __init__(self, part: str) -> None:
        self._part = part

    def parse(self, text: str) -> Call | None:
        if self._part == "parse":
            raise IndexError(f"no call in {text}")
        return Call("echo", "")

    def render(self, result: str) -> str:
        if self._part == "refused":
            raise TrimtabError("this template cannot be continued")
        raise KeyError(result)


@pytest.mark.parametrize(
    ("part", "failure"),
    [
        ("parse", "parse() of the format raised IndexError: no call in a!"),
        ("render", "render() of the format raised KeyError: ''"),
    ],
)
def test_a_format_that_raises_costs_its_episode(tokenizer: Any, part: str, failure: str) -> None:
    episodes = start(tokenizer, Tools, form=BrokenFormat(part))
    assert finished(episodes, append(tokenizer, None, "a!")) == ("stop", failure)


class OddFormat(BrokenFormat):
    """Returns, or raises, what it is given."""

    def __init__(self, parsed: Any) -> None:
        self._parsed = parsed

    def parse(self, text: str) -> Any:
        del text
        if isinstance(self._parsed, BaseException):
            raise self._parsed
        return self._parsed

    def render(self, result: str) -> str:
        raise SystemExit(len(result) + 5)


@pytest.mark.parametrize(
    ("parsed", "failure"),
    [
        (False, "parse() of the format returned False, neither None nor a Call whose arguments are a text or a"),
        ("", "parse() of the format returned '', neither None nor a Call"),
        (("echo", ""), "parse() of the format returned ('echo', ''), neither None nor a Call"),
        ({}, "parse() of the format returned {}, neither None nor a Call"),
        (Call("echo", None), "parse() of the format returned Call(tool='ec...rguments=None), neither"),  # pyright: ignore[reportArgumentType]
        (SystemExit(5), "parse() of the format raised SystemExit: 5"),
        (Call("echo", ""), "render() of the format raised SystemExit: 5"),
    ],
)
def test_a_format_that_returns_no_call_costs_its_episode(tokenizer: Any, parsed: Any, failure: str) -> None:
    episodes = start(tokenizer, Tools, form=OddFormat(parsed))
    turn = append(tokenizer, None, "a!")
    assert answer(episodes, turn).finish_reason == "stop"
    [[one, _]] = episodes.finish([[turn, turn]])
    assert one.outcome is not None
    assert str(one.outcome.failure).startswith(failure)
    assert one.outcome.tool_errors == 0


def test_a_format_that_cannot_be_used_ends_the_run(tokenizer: Any) -> None:
    with pytest.raises(TrimtabError, match="cannot be continued"):
        answer(start(tokenizer, Tools, form=BrokenFormat("refused")), append(tokenizer, None, "a!"))


def test_a_constructor_that_raises_costs_its_episode(tokenizer: Any) -> None:
    made: list[Any] = []

    def sometimes() -> Tools:
        made.append(None)
        if len(made) == 1:
            raise OSError("no connection")
        return Tools()

    episodes = start(tokenizer, type("First", (Tools,), {"__new__": lambda _: sometimes()}))
    turn = append(tokenizer, None, "5")
    answer(episodes, turn)
    [group] = episodes.finish([[turn, turn]])
    failures = {one.outcome.failure for one in group if one.outcome is not None}
    assert failures == {None, "the constructor raised OSError: no connection"}
    episodes.close()


def test_environments_are_closed_when_an_episode_cannot_begin(tokenizer: Any) -> None:
    made: list[Counter] = []

    class Begins(Counter):
        closed = False

        def __init__(self) -> None:
            made.append(self)

        def reset(self, **row: Any) -> str:
            del row
            return "text that no prompt shows"

    runner = EpisodeRunner(Begins, Tag(("add",)), LIMITS, tokenizer, 200, lambda *_: encode(ROWS, tokenizer))
    with pytest.raises(TrimtabError, match="is not in the prompt"):
        runner.start([encode(ROWS, tokenizer)], 2, reset_seeds=[0])
    assert [one.closed for one in made] == [True, True]


def test_a_prompt_that_reset_makes_too_long_costs_its_episode(tokenizer: Any) -> None:
    texts = iter([" Begin.", " word" * 30])

    class Begins(Counter):
        def reset(self, **row: Any) -> str:
            super().reset(**row)
            return next(texts)

    problem = Problem("p1", "How much?", "3")
    length = len(encode(replace(problem, question=problem.question + " word" * 30), tokenizer).ids)
    runner = EpisodeRunner(Begins, Tag(("add",)), LIMITS, tokenizer, 200, encode, length - 1)
    episodes = runner.start([encode(problem, tokenizer)], 2, reset_seeds=[0])
    assert sorted(len(prompt.text) for prompt in episodes.prompts) == [27, 34]
    turn = append(tokenizer, None, "5")
    [group] = episodes.finish([[turn], [turn]])
    failures = {one.outcome.failure for one in group if one.outcome is not None}
    assert failures == {
        None,
        f"what reset returned makes a prompt of {length} tokens, and the context holds {length - 1} besides "
        "max_tokens = 200",
    }


def test_an_environment_that_changes_its_row_changes_no_other(tokenizer: Any) -> None:
    seen: list[list[int]] = []

    class Empties(Counter):
        def reset(self, **row: Any) -> None:
            seen.append(list(row["rows"]))
            row["rows"].clear()

    runner = EpisodeRunner(Empties, Tag(("add",)), LIMITS, tokenizer, 200, encode)
    for _ in range(2):
        runner.start([encode(ROWS, tokenizer)] * 2, 2, reset_seeds=[0, 0])
    assert seen == [[1, 2]] * 8


@pytest.mark.parametrize("value", [10**400, Unprintable(), "1.0", b"1"])
def test_a_reward_that_cannot_be_converted_costs_its_episode(tokenizer: Any, value: Any) -> None:
    kind = type("Odd", (Counter,), {"get_reward": lambda _: value})
    failure = finished(start(tokenizer, kind), append(tokenizer, None, "5"))[1]
    assert failure is not None
    assert failure.endswith("not a finite number")
    assert len(failure) < 200


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
        (
            {"values": [1, "x"]},
            'numbers: values.1 = "x": Input should be a valid integer, unable to parse string as an integer',
        ),
        ({"values": {}}, "numbers: values = {}: Input should be a valid list"),
    ],
)
def test_arguments_that_do_not_fit_are_one_line(arguments: Any, line: str) -> None:
    with pytest.raises(ToolError) as error:
        call_tool(Tools(), Call("numbers", arguments))
    assert str(error.value) == line


def test_what_an_instance_holds_is_no_tool() -> None:
    """Neither is it shown to the model, nor may it be called; a property is not evaluated."""

    class Holding(Tools):
        def __init__(self) -> None:
            self.solve = lambda: "the solution"

        @property
        def broken(self) -> str:
            raise OSError

    names = tool_names(Holding)
    assert "solve" not in names
    with pytest.raises(ToolError, match="there is no tool 'solve'; there are: echo, leave, numbers, wait"):
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
    assert tool_names(Mixed) == ["echo", "leave", "numbers", "twice", "wait"]
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
