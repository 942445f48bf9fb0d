"""Prompt templates: plain, few-shot or chat.

A template is ordinary text with the words `{question}` and (few-shot) `{answer}`. Only these two are replaced, in one
pass, so braces of LaTeX in a template or in a question mean nothing special.

Of each template `prompt` returns the whole prompt, special tokens included, `target` the continuation that states an
answer, without its ending, and `style` is a description for reports.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trimtab.errors import TrimtabError
from trimtab.trainer import chat_template
from trimtab.types import Problem

FEW_SHOT = "Question: {question}\nAnswer: {answer}\n\n"


@dataclass(frozen=True)
class Plain:
    """A template with the question only."""

    text: str = "{question}"

    def __post_init__(self) -> None:
        _require_once(self.text, "question")

    def prompt(self, problem: Problem, tokenizer: Any) -> str:
        return beginning(tokenizer) + fill(self.text, question=problem.question)

    def target(self, answer: str) -> str:
        return answer

    style = "plain"


@dataclass(frozen=True)
class FewShot:
    """Worked examples, then the same text for the question up to the answer.

    Blanks before `{answer}` are not in the prompt: one that ends in a blank would split the token " 12".
    """

    examples: Sequence[Problem]
    text: str = FEW_SHOT

    def __post_init__(self) -> None:
        _require_once(self.text, "question")
        _require_once(self.text, "answer")
        if self.text.index("{answer}") < self.text.index("{question}"):
            raise TrimtabError(f"template {self.text!r}: put {{question}} before {{answer}}")

    @property
    def ending(self) -> str:
        """The character that follows an answer, at which a response stops."""
        after = self.text.partition("{answer}")[2]
        if not after:
            raise TrimtabError(f"template {self.text!r}: let a line break or another mark follow {{answer}}")
        return after[0]

    def prompt(self, problem: Problem, tokenizer: Any) -> str:
        shots = "".join(fill(self.text, question=shot.question, answer=shot.answer) for shot in self.examples)
        return beginning(tokenizer) + shots + fill(self._head.rstrip(" "), question=problem.question)

    def target(self, answer: str) -> str:
        return self._head[len(self._head.rstrip(" ")) :] + answer

    @property
    def style(self) -> str:
        return f"few-shot, {len(self.examples)} examples"

    @property
    def _head(self) -> str:
        return self.text.partition("{answer}")[0]


@dataclass(frozen=True)
class Chat:
    """One user turn, and an optional system turn, in the tokenizer's chat template."""

    text: str = "{question}"
    system: str | None = None
    answer: str = "{answer}"  # the form in which the text asks for the answer

    def __post_init__(self) -> None:
        _require_once(self.text, "question")
        _require_once(self.answer, "answer")

    def prompt(self, problem: Problem, tokenizer: Any, schemas: Sequence[Mapping[str, Any]] = ()) -> str:
        """Returns the whole prompt; `schemas` are JSON schemas of tools."""
        if not getattr(tokenizer, "chat_template", None):
            raise TrimtabError(
                f"style 'chat': the tokenizer {getattr(tokenizer, 'name_or_path', '')!r} has no chat template; "
                "use style 'plain', 'few-shot' (examples = 0 where there are none), or an instruction-tuned model"
            )
        messages = [{"role": "system", "content": self.system}] if self.system else []
        messages.append({"role": "user", "content": fill(self.text, question=problem.question)})
        tools = {"tools": list(schemas)} if schemas else {}
        return chat_template.render(tokenizer, messages, add_generation_prompt=True, **tools)

    def target(self, answer: str) -> str:
        return fill(self.answer, answer=answer)

    style = "chat"


Template = Plain | FewShot | Chat


def fill(template: str, **values: str) -> str:
    """Returns `template` with `{name}` replaced for the given names only, in one pass (values are not searched)."""
    names = "|".join(values)
    return re.sub(rf"\{{({names})\}}", lambda match: values[match.group(1)], template)


def _require_once(template: str, name: str) -> None:
    if template.count(f"{{{name}}}") != 1:
        raise TrimtabError(f"template {template!r}: write {{{name}}} exactly once")


def beginning(tokenizer: Any) -> str:
    """Returns the token this tokenizer puts before every text (Llama's <s>), or "" (GPT-2, SmolLM2, Qwen).

    Prompts are tokenized without special tokens because a chat template contains its own; plain text needs it.
    """
    bos = getattr(tokenizer, "bos_token", None)
    if bos is None:
        return ""
    start = tokenizer("")["input_ids"]
    return bos if start and start[0] == tokenizer.bos_token_id else ""
