"""Calls and results as text, and in a chat template, of which only what is new is appended."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from tests.support.chat_tokenizers import bundled_tokenizer, tokenizer
from tests.unit.trainer.environments.test_episodes import LIMITS, append, outcome, start

from trimtab.errors import TrimtabError
from trimtab.trainer import environments
from trimtab.trainer.config import EnvironmentConfig
from trimtab.trainer.environments.formats import Call, Fence, Tag, ToolError, build_format
from trimtab.trainer.environments.formats import Chat as ChatFormat
from trimtab.trainer.tasks.task import BuiltTask, Chat, Plain
from trimtab.types import Problem


@pytest.mark.parametrize(
    ("text", "call"),
    [
        (" <python>6 * 7</python>", Call("python", "6 * 7")),
        ("<python>a\nb</python>", Call("python", "a\nb")),
        ("<search>x</search> and <python>1</python>", Call("python", "1")),
        ("I will use <python> to compute.\n<python>1+1</python>", Call("python", "1+1")),
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


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tags", r"unknown format 'tags'.*'tag'"),
        ("fence", "does not name the tool, and there are 2"),
        (f"{__name__}:NoRender", "has no 'render'"),
        (f"{__name__}:Argument", r"cannot be made without arguments \(.*'mark'.*\): write __init__\(self\)"),
        (f"{__name__}:OneStop", r"stop = '!' must be a tuple of strings"),
        (f"{__name__}:OneBegin", r"begin = '<call>' must be a tuple of strings"),
    ],
)
def test_mistakes_in_a_format_are_one_line(name: str, message: str) -> None:
    with pytest.raises(TrimtabError, match=message):
        build_format(name, ("a", "b"))


def test_a_list_of_stops_is_taken() -> None:
    section = EnvironmentConfig(name="class", format=f"{__name__}:Stops")
    assert environments.build(section, Single).adapt(task(("\n",))).stop == ("\n", "!", "?")


class Both:
    def reset(self, **row: Any) -> None: ...

    def both(self, left: int, right: int) -> int:
        """Adds.

        Args:
            left: a number.
            right: another one.
        """
        return left + right


class WithPositions(Both):
    def add(self, left: int, right: int = 0, /, *rest: int) -> int:
        """Adds.

        Args:
            left: a number.
            right: another one.
            rest: more.
        """
        return left + right + sum(rest)


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
    built = environments.build(EnvironmentConfig(name="class"), WithPositions).adapt(task(("\n",)))
    assert built.stop == ("\n", "</add>", "</both>")


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
    built = environments.build(EnvironmentConfig(name="class", format=form), Both)
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
        "tag", Plain(), kind=Both
    )
    # What the user wrote stays as it is.
    assert prompt("tag", Plain(), "Example. ") == "Example. How much?"
    assert "Tools can be called" not in prompt("tag", Chat(system="Call <python>."))


@pytest.mark.parametrize(
    ("form", "stop"), [("fence", "\n"), ("fence", "```"), ("tag", ">"), ("tag", "<python"), ("chat", "\n")]
)
def test_a_stop_of_the_task_inside_every_call_is_refused(form: str, stop: str) -> None:
    built = environments.build(EnvironmentConfig(name="class", format=form), Single)
    template = Chat() if form == "chat" else Plain()
    with pytest.raises(TrimtabError, match=r"a turn of task 'numbers' ends at .* before a call in environment\.format"):
        built.adapt(replace(task(("###", stop)), template=template))
    assert built.adapt(replace(task(("###",)), template=template)).stop[0] == "###"


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


TEMPLATE = """{%- if tools %}<|im_start|>system
Tools: {{ tools | tojson }}<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and DROP and not loop.last %}{{ m.content.split('</think>')[-1] }}
{%- else %}{{ m.content }}{% endif %}
{%- for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


class Search:
    def reset(self, **row: Any) -> None: ...

    def search(self, text: str, limit: int = 3) -> str:
        """Searches.

        Args:
            text: what is searched for.
            limit: how many results.
        """
        return f"{limit} results for {text}"


SCHEMAS = environments.build(EnvironmentConfig(name="class"), Search).schemas()


def of(form: str, instructions: str = "") -> environments.BuiltEnvironment:
    return environments.build(EnvironmentConfig(name="class", format=form, instructions=instructions), Search)


@pytest.fixture(scope="module")
def appending() -> Any:
    return tokenizer(TEMPLATE.replace("DROP", "false"))


def test_a_result_is_what_the_template_puts_between_two_turns(appending: Any) -> None:
    form = ChatFormat(appending, SCHEMAS)
    text = form.render("three results")
    assert text == "<|im_end|>\n<|im_start|>tool\nthree results<|im_end|>\n<|im_start|>assistant\n"
    call = {"type": "function", "function": {"name": "search", "arguments": {"text": "a"}}}
    messages = [
        {"role": "user", "content": "Find a."},
        {"role": "assistant", "content": "Yes.", "tool_calls": [call]},
        {"role": "tool", "name": "search", "content": "three results"},
    ]
    whole = appending.apply_chat_template(messages, tools=list(SCHEMAS), tokenize=False, add_generation_prompt=True)
    turn = appending.apply_chat_template(messages[:2], tools=list(SCHEMAS), tokenize=False).rstrip("\n")
    assert whole == turn.removesuffix("<|im_end|>") + text
    assert form.stop == of("chat").adapt(replace(task(()), template=Chat())).stop == ("</tool_call>",), (
        "the turn ends where the call ends"
    )


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ('Yes.<tool_call>{"name": "search", "arguments": {"text": "a"}}</tool_call><|im_end|>', {"text": "a"}),
        ('<tool_call>\n{"name": "search", "arguments": {}}\n</tool_call>', {}),
        ('<tool_call>{"name": "search"}</tool_call>', {}),
        ('<think>A <tool_call>?</think>\n<tool_call>{"name": "search"}</tool_call>', {}),
        ('<tool_call>{"name": "search", "arguments": {"text": "<tool_call>"}}</tool_call>', {"text": "<tool_call>"}),
        ("The answer is 5.<|im_end|>", None),
    ],
)
def test_calls_are_parsed(appending: Any, text: str, call: dict[str, Any] | None) -> None:
    assert ChatFormat(appending, SCHEMAS).parse(text) == (None if call is None else Call("search", call))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<tool_call>search</tool_call>", "the call is not"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "recursion limit exceeded"),
        ('<tool_call>{"name": "search", "arguments": "a"}</tool_call>', "arguments: Input should be an object"),
        ('<tool_call>{"name": 5}</tool_call>', "name: Input should be a valid string"),
        ("<tool_call>[]</tool_call>", "Input should be an object"),
        ('<tool_call>{"arguments": {}}</tool_call>', "the call is not"),
    ],
)
def test_invalid_calls_are_reported_to_the_model(appending: Any, text: str, message: str) -> None:
    with pytest.raises(ToolError, match=message):
        ChatFormat(appending, SCHEMAS).parse(text)


def test_templates_that_cannot_be_continued_are_refused() -> None:
    with pytest.raises(TrimtabError, match=r"changes earlier turns.*'tag'"):
        ChatFormat(tokenizer(TEMPLATE.replace("DROP", "true")), SCHEMAS)
    with pytest.raises(TrimtabError, match="does not show tools"):
        ChatFormat(bundled_tokenizer(), SCHEMAS)
    with pytest.raises(TrimtabError, match="does not end a message with"):
        ChatFormat(tokenizer(TEMPLATE.replace("DROP", "false").replace("<|im_end|>", "###")), SCHEMAS)


def test_prompts_show_the_tools(appending: Any) -> None:
    problem, plain = Problem("1", "Find a.", "a"), task(("\n",))
    chat = replace(plain, template=Chat(), stop=())
    text = of("chat").adapt(chat).prompt_text(problem, appending)
    assert '"name": "search"' in text
    assert text.endswith("<|im_start|>user\nFind a.<|im_end|>\n<|im_start|>assistant\n")
    assert '"search"' not in chat.prompt_text(problem, appending)
    with pytest.raises(TrimtabError, match=r"needs prompts in the chat template"):
        of("chat").adapt(plain)
    with pytest.raises(TrimtabError, match=r"task\.system"):
        of("tag", "Example.").adapt(chat)
    adapted = of("tag", "Example. ").adapt(plain)
    assert adapted.prompt_text(problem, appending) == "Example. Find a."
    assert adapted.stop == ("\n", "</search>")


@pytest.mark.parametrize(("before", "void"), [("", True), ("so 5 ", False)])
def test_a_call_without_its_end_is_not_an_answer(appending: Any, before: str, void: bool) -> None:
    limits = LIMITS.model_copy(update={"answer": r"\d"})
    turn = append(appending, None, before + '<tool_call>{"name": "search", "arguments": {"limit": 5')
    episodes = start(appending, Search, limits=limits, form=ChatFormat(appending, SCHEMAS))
    assert outcome(episodes, turn).void == void
