"""Calls in a chat template: only what is new is appended, and templates that rewrite history are refused."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.chat_tokenizers import bundled_tokenizer, tokenizer
from tests.unit.trainer.environments.test_episodes import LIMITS, append, start

from trimtab.errors import TrimtabError
from trimtab.trainer import environments
from trimtab.trainer.config import EnvironmentConfig
from trimtab.trainer.environments.formats import Call, Chat, ToolError
from trimtab.trainer.tasks.task import BuiltTask
from trimtab.trainer.tasks.templates import Chat as ChatTemplate
from trimtab.trainer.tasks.templates import Plain
from trimtab.types import Problem

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


def chat_task() -> BuiltTask:
    problem = Problem("1", "Find a.", "a")
    return BuiltTask("t", [problem], [problem], ChatTemplate(), (), (), 8)


def test_a_result_is_what_the_template_puts_between_two_turns(appending: Any) -> None:
    form = Chat(appending, SCHEMAS)
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
    assert form.stop == of("chat").adapt(chat_task()).stop == ("</tool_call>",), "the turn ends where the call ends"


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ('Yes.<tool_call>{"name": "search", "arguments": {"text": "a"}}</tool_call><|im_end|>', {"text": "a"}),
        ('<tool_call>\n{"name": "search", "arguments": {}}\n</tool_call>', {}),
        ('<tool_call>{"name": "search"}</tool_call>', {}),
    ],
)
def test_calls_are_parsed(appending: Any, text: str, call: dict[str, Any]) -> None:
    assert Chat(appending, SCHEMAS).parse(text) == Call("search", call)


def test_a_text_without_a_call_has_none(appending: Any) -> None:
    assert Chat(appending, SCHEMAS).parse("The answer is 5.<|im_end|>") is None


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
        Chat(appending, SCHEMAS).parse(text)


def test_templates_that_cannot_be_continued_are_refused() -> None:
    with pytest.raises(TrimtabError, match=r"changes earlier turns.*'tag'"):
        Chat(tokenizer(TEMPLATE.replace("DROP", "true")), SCHEMAS)
    with pytest.raises(TrimtabError, match="does not show tools"):
        Chat(bundled_tokenizer(), SCHEMAS)
    with pytest.raises(TrimtabError, match="does not end a message with"):
        Chat(tokenizer(TEMPLATE.replace("DROP", "false").replace("<|im_end|>", "###")), SCHEMAS)


def test_prompts_show_the_tools(appending: Any) -> None:
    problem, task = Problem("1", "Find a.", "a"), chat_task()
    text = of("chat").adapt(task).prompt_text(problem, appending)
    assert '"name": "search"' in text
    assert text.endswith("<|im_start|>user\nFind a.<|im_end|>\n<|im_start|>assistant\n")
    assert '"search"' not in task.prompt_text(problem, appending)
    plain = BuiltTask("t", [problem], [problem], Plain(), (), ("\n",), 8)
    with pytest.raises(TrimtabError, match=r"needs prompts in the chat template"):
        of("chat").adapt(plain)
    with pytest.raises(TrimtabError, match=r"task\.system"):
        of("tag", "Example.").adapt(task)
    adapted = of("tag", "Example. ").adapt(plain)
    assert adapted.prompt_text(problem, appending) == "Example. Find a."
    assert adapted.stop == ("\n", "</search>")


@pytest.mark.parametrize(("before", "void"), [("", True), ("so 5 ", False)])
def test_a_call_without_its_end_is_not_an_answer(appending: Any, before: str, void: bool) -> None:
    limits = LIMITS.model_copy(update={"answer": r"\d"})
    turn = append(appending, None, before + '<tool_call>{"name": "search", "arguments": {"limit": 5')
    episodes = start(appending, Search, limits=limits, form=Chat(appending, SCHEMAS))
    [[one, _]] = episodes.finish([[turn, turn]])
    assert one.outcome is not None
    assert one.outcome.void == void
