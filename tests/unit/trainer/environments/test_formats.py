"""Calls and results as text."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from tests.support.chat_tokenizers import bundled_tokenizer

from trimtab.errors import TrimtabError
from trimtab.trainer import environments
from trimtab.trainer.config import EnvironmentConfig
from trimtab.trainer.environments.formats import Call, Fence, Tag, ToolError, build_format
from trimtab.trainer.tasks.task import BuiltTask
from trimtab.trainer.tasks.templates import Chat, Plain
from trimtab.types import Problem


@pytest.mark.parametrize(
    ("text", "call"),
    [
        (" <python>6 * 7</python>", Call("python", "6 * 7")),
        ("<python>a\nb</python>", Call("python", "a\nb")),
        ("<search>x</search> and <python>1</python>", Call("python", "1")),
        ("<python>1</search>", None),
        ("<python>1", None),
        ("no call: 1 < 2", None),
        ("<python></python>", Call("python", "")),
    ],
)
def test_tag(text: str, call: Call | None) -> None:
    form = Tag(("python", "search"))
    assert form.parse(text) == call
    assert form.stop == ("</python>", "</search>")
    assert form.render("42") == "<output>42</output>"


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("Let us see.\n```python\nprint(1)\n```\n", Call(None, "print(1)")),
        ("```python\na = 1\nb = 2\n```", Call(None, "a = 1\nb = 2")),
        ("```python\nprint('''```''')\n```\n", Call(None, "print('''```''')")),
        ("```\nprint(1)\n```\n", None),
        ("```python\nprint(1)", None),
    ],
)
def test_fence(text: str, call: Call | None) -> None:
    assert Fence().parse(text) == call
    assert Fence().render("1") == "```output\n1\n```\n"


def test_the_opening_line_of_a_block_is_not_a_stop() -> None:
    [stop] = Fence().stop
    assert stop not in "Text\n```python\nx"
    assert stop in "Text\n```python\nx\n```\n"


def test_unknown_formats_are_one_line() -> None:
    with pytest.raises(TrimtabError, match=r"unknown format 'tags'.*'tag'"):
        build_format("tags", ("python",))
    with pytest.raises(TrimtabError, match="does not name the tool, and there are 2"):
        build_format("fence", ("a", "b"))
    with pytest.raises(TrimtabError, match="has no 'render'"):
        build_format("tests.unit.trainer.environments.test_formats:NoRender", ())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Argument", r"cannot be made without arguments \(.*'mark'.*\): write __init__\(self\)"),
        ("OneStop", r"stop = '!' must be a tuple of strings"),
        ("OneBegin", r"begin = '<call>' must be a tuple of strings"),
    ],
)
def test_mistakes_in_a_format_are_one_line(name: str, message: str) -> None:
    with pytest.raises(TrimtabError, match=message):
        build_format(f"tests.unit.trainer.environments.test_formats:{name}", ())


def test_a_list_of_stops_is_taken() -> None:
    section = EnvironmentConfig(name="class", format="tests.unit.trainer.environments.test_formats:Stops")
    assert environments.build(section, Two).adapt(task(("\n",))).stop == ("\n", "!", "?")


class Two:
    """Tools that need no, one and two arguments."""

    def reset(self, **row: Any) -> None: ...

    @staticmethod
    def one(text: str, more: str = "") -> str:
        """Repeats.

        Args:
            text: what is repeated.
            more: what follows.
        """
        return text + more

    def add(self, left: int, right: int = 0, /, *rest: int) -> int:
        """Adds.

        Args:
            left: a number.
            right: another one.
            rest: more.
        """
        return left + right + sum(rest)


class Three(Two):
    def both(self, left: int, right: int) -> int:
        """Adds.

        Args:
            left: a number.
            right: another one.
        """
        return left + right


class OnlyBoth:
    def reset(self, **row: Any) -> None: ...

    both = Three.both


class Single:
    def reset(self, **row: Any) -> None: ...

    def python(self, code: str) -> str:
        """Repeats.

        Args:
            code: what is repeated.
        """
        return code


def task(stop: tuple[str, ...]) -> BuiltTask:
    problem = Problem("1", "How much?", "3")
    return BuiltTask("numbers", [problem], [problem], Plain(), (), stop, 8)


def test_the_arguments_of_a_tool_that_needs_several_are_a_json_object() -> None:
    form = Tag(("both", "add"), frozenset({"both"}))
    assert form.parse('<both>{"left": 6, "right": 7}</both>') == Call("both", {"left": 6, "right": 7})
    assert form.parse('<add>{"left": 6}</add>') == Call("add", '{"left": 6}')
    for content in ("6, 7", "[6, 7]", "[" * 100_000):
        with pytest.raises(ToolError, match="both: the call is not a JSON object of arguments"):
            form.parse(f"<both>{content}</both>")
    built = environments.build(EnvironmentConfig(name="class"), Three).adapt(task(("\n",)))
    assert built.stop == ("\n", "</add>", "</both>", "</one>")


def test_advice_about_formats_ends_at_one_that_works() -> None:
    """A tool with two arguments, and the bundled model, whose chat template shows no tools."""
    for form in ("fence", "chat", "tag"):
        for style in (Plain(), Chat()):
            tried, advised = [], form
            while advised is not None:
                assert advised not in tried
                tried.append(advised)
                advised = refused(advised, style)
            assert tried[-1] == "tag"


def refused(form: str, style: Plain | Chat) -> str | None:
    """The format that the refusal of a format advises; None where it works."""
    built = environments.build(EnvironmentConfig(name="class", format=form), OnlyBoth)
    try:
        built.adapt(replace(task(("###",)), template=style))
        built.runner(bundled_tokenizer(), 64, lambda *_: None)  # type: ignore[arg-type]
    except TrimtabError as error:
        return re.findall(r"take (?:environment\.)?format (?:= )?[\'\"](\w+)[\'\"]", str(error))[0]
    return None


def test_prompts_describe_the_tools_where_nobody_else_does() -> None:
    problem = Problem("1", "How much?", "3")

    def prompt(form: str, template: Plain | Chat, instructions: str = "", kind: type = Single) -> str:
        built = environments.build(EnvironmentConfig(name="class", format=form, instructions=instructions), kind)
        return built.adapt(replace(task(("###",)), template=template)).prompt_text(problem, bundled_tokenizer())

    line = "<python>CODE</python>: Repeats. code (string): what is repeated."
    assert line in prompt("tag", Plain())
    assert prompt("tag", Plain()).endswith(f"{line}\n\nHow much?")
    assert "<|im_start|>system\nTools can be called. A call ends the turn; its result" in prompt("tag", Chat())
    assert line in prompt("tag", Chat())
    assert "begins with ```python and ends with ```" in prompt("fence", Chat())
    assert "code (string): what is repeated." in prompt("fence", Chat())
    assert '<both>{"left": LEFT, "right": RIGHT}</both>: Adds. left (integer): a number. right' in prompt(
        "tag", Plain(), kind=OnlyBoth
    )
    # What the user wrote stays as it is.
    assert prompt("tag", Plain(), "Example. ") == "Example. How much?"
    assert "Tools can be called" not in prompt("tag", Chat(system="Call <python>."))


@pytest.mark.parametrize(("form", "stop"), [("fence", "\n"), ("fence", "```"), ("tag", ">"), ("tag", "<python")])
def test_a_stop_of_the_task_inside_every_call_is_refused(form: str, stop: str) -> None:
    built = environments.build(EnvironmentConfig(name="class", format=form), Single)
    with pytest.raises(TrimtabError, match=r"a turn of task 'numbers' ends at .* before a call in environment\.format"):
        built.adapt(task(("###", stop)))
    assert built.adapt(task(("###",))).stop[0] == "###"


def test_a_stop_of_the_task_inside_every_call_of_the_chat_template_is_refused() -> None:
    built = environments.build(EnvironmentConfig(name="class", format="chat"), Single)
    with pytest.raises(TrimtabError, match=r"ends at '\\n', before a call in environment\.format = 'chat'"):
        built.adapt(replace(task(("\n",)), template=Chat()))
    assert built.adapt(replace(task(("###",)), template=Chat())).stop == ("###", "</tool_call>")


class Argument:
    def __init__(self, mark: str) -> None:
        self.stop = (mark,)


class OneStop:
    stop: Any = "!"

    def parse(self, text: str) -> Call | None:
        del text
        return None

    def render(self, result: str) -> str:
        return result


class OneBegin(OneStop):
    stop = ["!"]  # noqa: RUF012
    begin = "<call>"


class Stops(OneStop):
    stop = ["!", "?"]  # noqa: RUF012


class NoRender:
    stop = ()

    def parse(self, text: str) -> Call | None:
        del text
        return None
