"""Base classes of tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

from pydantic import BaseModel, ConfigDict

from trimtab.errors import TrimtabError
from trimtab.trainer.tasks.templates import Chat, Template, beginning
from trimtab.types import Problem, RewardSpec, Task


class TaskOptions(BaseModel):
    """Keywords of a kind of task: unknown ones are errors, values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def build(self) -> Task:
        """Returns the task. Raises `TrimtabError` for options that do not fit each other or the data."""
        raise NotImplementedError


@dataclass(frozen=True)
class BuiltTask:
    """A task ready for use; implements `trimtab.types.Task`.

    `instructions` is text before every prompt, `schemas` describe tools in the chat template.
    """

    name: str
    train: Sequence[Problem]
    test: Sequence[Problem]
    template: Template
    rewards: tuple[RewardSpec, ...]
    stop: tuple[str, ...]
    max_tokens: int
    notes: tuple[str, ...] = ()
    instructions: str = ""
    schemas: tuple[Mapping[str, Any], ...] = ()

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
        """Returns the task as part of multi-turn episodes.

        Args:
            stop: the strings that end a call.
            schemas: JSON schemas of the tools, for the chat template.
            instructions: text before every prompt.
            description: of the tools, for prompts that have neither instructions nor a system turn of the user's.
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
    """A sequence of `size` problems computed on access by the pure function `make(index)`."""

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
