"""The prompt options shared by tasks with external questions, and the template built from them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from trimtab.errors import TrimtabError
from trimtab.trainer.tasks.task import TaskOptions
from trimtab.trainer.tasks.templates import FEW_SHOT, Chat, FewShot, Plain, Template
from trimtab.types import Problem

CHAT_TOKENS = 512
SPARE_TOKENS = 8  # room for a blank, a currency sign, a stop


class StyleOptions(TaskOptions):
    style: Literal["chat", "few-shot", "plain"] = Field("few-shot", description="how a question becomes a prompt")
    template: str | None = Field(None, description="text with {question} and, few-shot, {answer}")
    examples: int = Field(4, ge=0, le=64, description="worked examples, few-shot only; taken out of the training split")
    system: str | None = Field(None, description="system turn, chat only")
    stop: tuple[str, ...] | None = Field(
        None, description="strings that end a response; default: what the style implies"
    )
    max_tokens: int | None = Field(None, ge=1, description="default: what the answers need; 512 for chat and plain")
    seed: int = Field(0, description="draws the split and the worked examples")


def split_shots(
    options: StyleOptions, worked: Sequence[Problem], train: Sequence[Problem], where: str
) -> tuple[list[Problem], list[Problem]]:
    """Returns worked examples (`worked`, else drawn from the training split) and the remaining training problems."""
    if options.style != "few-shot":
        return [], list(train)
    if worked:
        if options.examples > len(worked):
            raise TrimtabError(
                f"{where}: examples = {options.examples}, but this format brings {len(worked)} worked examples; "
                "lower it, or name the columns instead of the format to show rows"
            )
        return list(worked[: options.examples]), list(train)
    if len(train) < options.examples:
        raise TrimtabError(
            f"{where}: {options.examples} worked examples are wanted but the training split has {len(train)} problems; "
            "lower examples or holdout, use style = 'chat' or 'plain', or name a training file (or split) beside the "
            "test file (or split)"
        )
    chosen = random.Random(f"examples/{options.seed}").sample(range(len(train)), options.examples)
    kept = frozenset(chosen)
    return [train[index] for index in chosen], [problem for index, problem in enumerate(train) if index not in kept]


def build_template(options: StyleOptions, shots: Sequence[Problem], chat: Chat) -> Template:
    """Returns the template of these options.

    A chat asks as `chat` does; with a template from the user, the answer has the form `chat.answer` only if that
    template asks for it.
    """
    if options.system is not None and options.style != "chat":
        raise TrimtabError(f"system: only style = 'chat' has a system turn, not {options.style!r}")
    if options.style == "few-shot":
        return FewShot(shots, options.template or FEW_SHOT)
    if options.style == "plain":
        return Plain(options.template or "{question}")
    text = options.template or chat.text
    asks_for_form = chat.answer.partition("{answer}")[0] in text
    return Chat(text, options.system or chat.system, chat.answer if asks_for_form else "{answer}")


def limits(
    options: StyleOptions, template: Template, shots: Sequence[Problem], answers: Sequence[str], where: str
) -> tuple[tuple[str, ...], int]:
    """Returns stop strings and the response limit in tokens.

    Raises `TrimtabError` if an answer contains a stop string.

    A few-shot response may be as long as the longest worked example followed by the longest answer, with one token
    for each character.
    """
    stop = options.stop
    if stop is None:
        stop = (template.ending,) if isinstance(template, FewShot) else ()
    shown = [shot.answer for shot in shots]
    for answer in (*shown, *answers):
        if clash := next((mark for mark in stop if mark and mark in answer), None):
            raise TrimtabError(
                f"{where}: the answer {answer[:40]!r} contains the stop string {clash!r}; say with format, "
                "answer_format or answer_pattern which part of it counts, use style = 'chat', or end the template's "
                "answers otherwise"
            )
    if options.max_tokens is not None:
        return stop, options.max_tokens
    if isinstance(template, FewShot):
        return stop, sum(max(map(len, texts), default=0) for texts in (shown, answers)) + SPARE_TOKENS
    return stop, CHAT_TOKENS
