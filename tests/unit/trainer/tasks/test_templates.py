"""Prompts, character for character."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.errors import TrimtabError
from trimtab.trainer.tasks.templates import Chat, FewShot, Plain, beginning, fill
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
