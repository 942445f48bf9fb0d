"""Building blocks of tasks: prompt templates (plain, few-shot or chat), options, and the built task.

A template is plain text with the placeholders `{question}` and (few-shot) `{answer}`. Only these two are replaced, in
one pass, so LaTeX braces in a template or in a question need no escaping.

Each template class has the method `prompt`, which returns the whole prompt with its special tokens, the method
`target`, which returns the continuation that states an answer, without a stop string, and `style`, a description.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, overload

from pydantic import BaseModel, ConfigDict, Field

from trimtab.errors import TrimtabError
from trimtab.trainer import chat_template
from trimtab.types import Problem, RewardSpec, Task

FEW_SHOT = "Question: {question}\nAnswer: {answer}\n\n"
CHAT_TOKENS = 512
SPARE_TOKENS = 8  # for a space, a currency sign, a stop string


@dataclass(frozen=True)
class Plain:
    """A template that contains only the question."""

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
    """A template with worked examples, followed by the same text for the question, up to the answer.

    The prompt leaves out spaces before `{answer}`: a prompt that ends in a space would split the token " 12".
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
        """The character that follows an answer in the template: a response stops there."""
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
    answer: str = "{answer}"  # the form of the answer that the text requests

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
    """Returns `template` with `{name}` replaced for the given names, in one pass: values are not searched again."""
    names = "|".join(values)
    return re.sub(rf"\{{({names})\}}", lambda match: values[match.group(1)], template)


def _require_once(template: str, name: str) -> None:
    if template.count(f"{{{name}}}") != 1:
        raise TrimtabError(f"template {template!r}: write {{{name}}} exactly once")


def beginning(tokenizer: Any) -> str:
    """Returns the token that the tokenizer puts before every text (Llama: <s>), or "" (GPT-2, SmolLM2, Qwen).

    Prompts are tokenized without adding special tokens, because chat templates contain them. Plain prompts must
    therefore begin with this token.
    """
    bos = getattr(tokenizer, "bos_token", None)
    if bos is None:
        return ""
    start = tokenizer("")["input_ids"]
    return bos if start and start[0] == tokenizer.bos_token_id else ""


class TaskOptions(BaseModel):
    """The keywords of a kind of task. Unknown keywords are errors, and values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def build(self) -> Task:
        """Returns the task. Raises `TrimtabError` if options contradict each other or the data."""
        raise NotImplementedError


@dataclass(frozen=True)
class BuiltTask:
    """A built task; implements `trimtab.types.Task`."""

    name: str
    train: Sequence[Problem]
    test: Sequence[Problem]
    template: Template
    rewards: tuple[RewardSpec, ...]
    stop: tuple[str, ...]
    max_tokens: int
    notes: tuple[str, ...] = ()
    instructions: str = ""  # text before every prompt
    schemas: tuple[Mapping[str, Any], ...] = ()  # JSON schemas of tools, for the chat template

    @property
    def prompt_style(self) -> str:
        return self.template.style

    def prompt_text(self, problem: Problem, tokenizer: Any) -> str:
        if isinstance(self.template, Chat):
            return self.template.prompt(problem, tokenizer, self.schemas)
        prompt = self.template.prompt(problem, tokenizer)
        if not self.instructions:
            return prompt
        first = beginning(tokenizer)
        return first + self.instructions + prompt.removeprefix(first)

    def with_tools(
        self, stop: tuple[str, ...], schemas: Sequence[Any], instructions: str, description: str
    ) -> BuiltTask:
        """Returns the task for multi-turn episodes.

        Args:
            stop: the strings that end a tool call.
            schemas: JSON schemas of the tools, for the chat template.
            instructions: text before every prompt.
            description: describes the tools; used if the user gave neither instructions nor a system turn.
        """
        chat = isinstance(self.template, Chat)
        if schemas and not chat:
            raise TrimtabError(
                f"environment.format = 'chat' needs prompts in the chat template, and those of task {self.name!r} are "
                f'{self.prompt_style}: take format "tag", or a task with style = "chat" (file, hf, reasoning-gym)'
            )
        if instructions and chat:
            raise TrimtabError(
                "environment.instructions go before plain prompts: with prompts in the chat template, write them to "
                "task.system"
            )
        template = self.template
        if isinstance(template, Chat):
            template = replace(template, system=template.system or description or None)
        elif description and not instructions:
            instructions = f"{description}\n\n"
        return replace(
            self, stop=self.stop + stop, schemas=tuple(schemas), instructions=instructions, template=template
        )

    def gold(self, problem: Problem) -> str:
        target = self.template.target(problem.answer)
        return target if target.endswith(self.stop) or not self.stop else target + self.stop[0]


class Procedural(Sequence[Problem]):
    """A sequence of `size` problems; the pure function `make(index)` computes a problem on access."""

    def __init__(self, size: int, make: Callable[[int], Problem]) -> None:
        self._size = size
        self._make = make

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> Problem: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Problem]: ...
    def __getitem__(self, index: int | slice) -> Problem | Sequence[Problem]:
        if isinstance(index, slice):
            return [self._make(i) for i in range(*index.indices(self._size))]
        if not -self._size <= index < self._size:
            raise IndexError(index)
        return self._make(index % self._size)


class StyleOptions(TaskOptions):
    style: Literal["chat", "few-shot", "plain"] = Field("few-shot", description="how a question becomes a prompt")
    template: str | None = Field(None, description="text with {question} and, few-shot, {answer}")
    examples: int = Field(4, ge=0, le=64, description="worked examples, few-shot only; taken out of the training split")
    system: str | None = Field(None, description="system turn, chat only")
    stop: tuple[str, ...] | None = Field(None, description="strings that end a response; default: those of the style")
    max_tokens: int | None = Field(None, ge=1, description="default: what the answers need; 512 for chat and plain")
    seed: int = Field(0, description="draws the split and the worked examples")


def split_shots(
    options: StyleOptions, worked: Sequence[Problem], train: Sequence[Problem], where: str
) -> tuple[list[Problem], list[Problem]]:
    """Returns the worked examples and the training problems that remain.

    The examples are taken from `worked` if there are any, otherwise drawn from the training split.
    """
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
    """Returns the template that the options describe.

    `chat` is the default chat template. If the user gave another text, answers have the form `chat.answer` only if that
    text requests it.
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
    """Returns the stop strings and the response limit in tokens.

    The default limit of few-shot responses is the number of characters of the longest worked example and the longest
    answer, plus a few tokens. Raises `TrimtabError` if an answer contains a stop string.
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
