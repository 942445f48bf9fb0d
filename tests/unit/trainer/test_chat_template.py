"""Chat templates that fail or do not end are errors of one line, in time."""

from __future__ import annotations

import threading
import time

import pytest
from tests.support.chat_tokenizers import bundled_tokenizer, tokenizer

from trimtab.errors import TrimtabError
from trimtab.trainer import chat_template
from trimtab.trainer.environments.formats import Chat as ChatFormat
from trimtab.trainer.tasks.templates import Chat
from trimtab.types import Problem

NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}" + (
    "{% endfor %}{% endfor %}"
)
BRANCHING = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
SCHEMAS = [{"type": "function", "function": {"name": "search", "parameters": {}}}]


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must\n alternate') }}", "TemplateError: roles must alternate"),
        ("{{ absent() }}", "UndefinedError: 'absent' is undefined"),
        ("{% for m in messages %}", "TemplateSyntaxError: Unexpected end of template"),
        ("{{ messages.append(1) }}", "SecurityError: access to attribute 'append' of 'list' object is unsafe"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError: access to attribute '__class__' of 'str' object is unsafe"),
        ("{{ range(100001) }}", "OverflowError: Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError: maximum recursion depth"),
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_template_that_fails_is_named_in_one_line(template: str, reason: str) -> None:
    with pytest.raises(TrimtabError) as caught:
        Chat().prompt(Problem("1", "1+1", "2"), tokenizer(template))
    assert "the chat template of" in str(caught.value)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(TrimtabError, match=r"the chat template of .* failed"):
        ChatFormat(tokenizer(template), SCHEMAS)


@pytest.mark.parametrize("template", [NESTED, BRANCHING], ids=["nested loops", "branching macros"])
def test_a_template_that_does_not_end_is_stopped(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "SECONDS", 0.2)
    before = set(threading.enumerate())
    with pytest.raises(TrimtabError, match=r"did not end within 0\.2 s"):
        Chat().prompt(Problem("1", "1+1", "2"), tokenizer(template))
    end = time.monotonic() + 60
    while set(threading.enumerate()) - before:
        assert time.monotonic() < end, "the abandoned thread still runs"
        time.sleep(0.01)


def test_a_template_that_works_is_rendered_as_transformers_does() -> None:
    built = bundled_tokenizer()
    messages = [{"role": "user", "content": "1+1"}]
    expected = built.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert chat_template.render(built, messages, add_generation_prompt=True) == expected
