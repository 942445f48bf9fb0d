"""Base classes of tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

from pydantic import BaseModel, ConfigDict

from trimtab.tasks.templates import Template, beginning
from trimtab.types import Problem, RewardSpec


class TaskOptions(BaseModel):
    """Keywords of a kind of task: unknown ones are errors, values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True)
class BuiltTask:
    """A task ready for use; implements `trimtab.types.Task`. `instructions` is text before every prompt."""

    name: str
    train: Sequence[Problem]
    test: Sequence[Problem]
    template: Template
    rewards: tuple[RewardSpec, ...]
    stop: tuple[str, ...]
    max_tokens: int
    notes: tuple[str, ...] = ()
    instructions: str = ""

    @property
    def prompt_style(self) -> str:
        return self.template.style((self.test or self.train)[0])

    def prompt_text(self, problem: Problem, tokenizer: Any) -> str:
        prompt = self.template.prompt(problem, tokenizer)
        if not self.instructions:
            return prompt
        first = beginning(tokenizer)
        return first + self.instructions + prompt.removeprefix(first)

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

    def __iter__(self) -> Iterator[Problem]:
        return map(self._make, range(self._size))
