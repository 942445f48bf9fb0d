"""Prompts, character for character; chat templates that fail or do not end; gold answers out of data sets."""

import re
import threading
import time
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.chat_tokenizers import bundled_tokenizer, tokenizer

from trimtab.errors import TrimtabError
from trimtab.trainer import chat_template
from trimtab.trainer.environments.formats import Chat as ChatFormat
from trimtab.trainer.tasks.answers import extract
from trimtab.trainer.tasks.task import Chat, FewShot, Plain, beginning, fill
from trimtab.types import Problem

SHOTS = [Problem("1", "one {answer}?", "1"), Problem("2", "two?", "2")]
ASKED = Problem("3", "\\frac{a}{b} {question} {answer}?", "3")


class WithBos:
    bos_token, bos_token_id = "<s>", 1
    chat_template = None
    name_or_path = "some/model"

    def __call__(self, text):
        return {"input_ids": [1, *map(ord, text)]}


class Chatty:
    chat_template = "yes"

    def apply_chat_template(self, messages, *, tokenize, add_generation_prompt):
        assert not tokenize
        assert add_generation_prompt
        return "|".join(f"{message['role']}={message['content']}" for message in messages) + "|assistant="


def test_few_shot_never_searches_a_question_for_words_of_the_template():
    template = FewShot(SHOTS)
    assert template.prompt(ASKED, None) == (
        "Question: one {answer}?\nAnswer: 1\n\n"
        "Question: two?\nAnswer: 2\n\n"
        "Question: \\frac{a}{b} {question} {answer}?\nAnswer:"
    )
    assert template.target("3") == " 3"
    assert template.ending == "\n"


def test_prompt_plus_target_is_a_whole_example():
    template = FewShot([], "Q[{question}] => <{answer}>;")
    assert template.prompt(SHOTS[1], None) + template.target("2") == "Q[two?] => <2"
    assert template.ending == ">"


def test_plain_text_begins_with_what_the_tokenizer_begins_with():
    assert Plain("{question}=").prompt(SHOTS[1], WithBos()) == "<s>two?="
    assert Plain("{question}=").prompt(SHOTS[1], None) == "two?="
    assert beginning(Chatty()) == ""


def test_chat_turns():
    template = Chat("{question} Use \\boxed{}.", system="Be brief.", answer="\\boxed{{answer}}")
    assert template.prompt(SHOTS[1], Chatty()) == "system=Be brief.|user=two? Use \\boxed{}.|assistant="
    assert template.target("2") == "\\boxed{2}"


def test_chat_needs_a_chat_template():
    with pytest.raises(TrimtabError, match="'some/model' has no chat template; use style 'plain'"):
        Chat().prompt(ASKED, WithBos())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Plain("no word"), "write {question} exactly once"),
        (lambda: Plain("{question}{question}"), "exactly once"),
        (lambda: FewShot([], "{question}"), "write {answer} exactly once"),
        (lambda: FewShot([], "{answer} {question}"), "put {question} before {answer}"),
        (lambda: FewShot([], "{question} {answer}").ending, "let a line break or another mark follow"),
    ],
)
def test_unusable_templates(make, words):
    with pytest.raises(TrimtabError) as error:
        make()
    assert words in str(error.value)


@given(st.text(), st.text())
def test_fill_is_literal(question, answer):
    assert fill("a{question}b{answer}c{}", question=question, answer=answer) == f"a{question}b{answer}c{{}}"


@pytest.mark.parametrize(
    ("value", "form", "answer"),
    [
        (14.0, "number", "14"),
        (0.6666666667, "number", "0.6666666667"),
        (1e22, "number", "10000000000000000000000"),
        (-0.0, "number", "0"),
        ("025", "number", "25"),
        ("1,200", "number", "1200"),
        (" -3.50 ", "number", "-3.5"),
        ("−4", "number", "-4"),
        ("1/2", "number", "1/2"),
        (".5", "number", "0.5"),
        (Decimal("2.50"), "number", "2.5"),
        ("so 9 * 2 = <<9*2=18>>18.\n#### 18", "gsm8k", "18"),
        ("#### 4 no\n#### 2,125", "gsm8k", "2125"),
        ("x \\boxed{1} then $\\boxed{\\frac{1}{2}}$.", "boxed", "\\frac{1}{2}"),
        ("\\boxed{\\{1, 2\\}}", "boxed", "\\{1, 2\\}"),
        ("\\framebox{204} minutes", "boxed", "204"),
        ("\\boxed {a\\\\}", "boxed", "a\\\\"),
        ("  as it is ", "text", "as it is"),
        (27.0, "text", "27"),
    ],
)
def test_answers(value, form, answer):
    assert extract(value, form) == answer


@pytest.mark.parametrize(
    ("value", "form", "words"),
    [
        (None, "text", "there is no answer"),
        ("  ", "number", "there is no answer"),
        (float("nan"), "number", "the answer is nan"),
        (True, "number", "the answer is a bool"),
        ([1], "text", "the answer is a list"),
        ("twelve", "number", "'twelve' is not a number"),
        ("1,20", "number", "is not a number"),
        ("1/0", "number", "is not a number"),
        ("18", "gsm8k", "no '#### <number>' in '18'"),
        ("x = 5", "boxed", "no \\boxed{...} in 'x = 5'"),
        ("\\boxed{1", "boxed", "never closed"),
        ("\\boxed{ }", "boxed", "is empty"),
    ],
)
def test_what_is_no_answer_is_an_error(value, form, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        extract(value, form)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_keep_their_value(value):
    assert float(extract(value, "number")) == value


balanced = st.recursive(
    st.sampled_from(["a", "1", " ", "\\{", "\\}"]),
    lambda inner: inner.map(lambda text: f"{{{text}}}") | st.tuples(inner, inner).map("".join),
    max_leaves=8,
)


@given(balanced.filter(str.strip))
def test_balanced_braces_come_out_whole(content):
    assert extract(f"so \\boxed{{{content}}} and {{more}}", "boxed") == content.strip()


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
