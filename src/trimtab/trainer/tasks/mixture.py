"""A mixture of tasks: training problems come from several tasks, in proportion to the weights of the tasks.

An epoch contains every problem of every task; problems of a task that is too small for its share are repeated. The
stream of prompts shuffles the epoch by the seed of the run. The id of a problem begins with the label of its task
("gsm8k/12"), also in trajectory files, and `extra["task"]` is the label.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from trimtab.errors import TrimtabError
from trimtab.trainer import tasks
from trimtab.trainer.tasks.task import Procedural, TaskOptions
from trimtab.types import Problem, RewardSpec, Task

EPOCH = 10_000_000
"""Upper bound of an epoch. A large task with a small weight would need a longer epoch to show all of its problems."""


class MixturePart(BaseModel):
    """One task of a mixture, with the keywords of its kind."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str
    label: str | None = Field(None, pattern=r"^[\w.-]+$")
    weight: float = Field(1.0, gt=0, le=1e6)


class MixtureOptions(TaskOptions):
    part: list[MixturePart] = Field(
        min_length=1,
        description="a table for each task: `name`, its kind; `weight` (default 1), its share; `label` (default: the "
        "name) in ids and metrics; and the keywords of its kind",
    )

    @field_validator("part")
    @classmethod
    def _have_different_labels(cls, part: list[MixturePart]) -> list[MixturePart]:
        labels = [item.label or item.name for item in part]
        if len(set(labels)) < len(labels):
            raise ValueError(f"the labels {', '.join(labels)} are not all different: give each task a different label")
        return part

    def build(self) -> Mixture:
        weights = {part.label or part.name: part.weight for part in self.part}
        built = (tasks.build(part.name, **(part.model_extra or {})) for part in self.part)
        parts = dict(zip(weights, built, strict=True))
        stops = {part.stop for part in parts.values()}
        if len(stops) > 1:
            raise TrimtabError(
                f"task 'mixture': its tasks end responses in different ways ({', '.join(map(repr, sorted(stops)))}), "
                "and a run has one: give all the same style, or stop"
            )
        if empty := [label for label, part in parts.items() if not len(part.train)]:
            raise TrimtabError(f"task 'mixture': {', '.join(empty)} has no training problem: lower its holdout")
        specs = {
            label: [{**spec.options, "name": spec.name, "weight": spec.weight} for spec in part.rewards]
            for label, part in parts.items()
        }
        timeout = max(sum(spec.timeout for spec in part.rewards) for part in parts.values())
        return Mixture(
            name="mixture",
            parts=parts,
            train=_mix({label: part.train for label, part in parts.items()}, weights),
            test=_interleave({label: part.test for label, part in parts.items()}, weights),
            rewards=(RewardSpec("by-task", timeout=timeout, options={"rewards": specs}),),
            stop=stops.pop(),
            max_tokens=max(part.max_tokens for part in parts.values()),
        )


@dataclass(frozen=True)
class Mixture:
    """A mixture of built tasks; implements `trimtab.types.Task`."""

    name: str
    parts: Mapping[str, Task]  # by label
    train: Sequence[Problem]
    test: Sequence[Problem]
    rewards: tuple[RewardSpec, ...]
    stop: tuple[str, ...]
    max_tokens: int

    @property
    def prompt_style(self) -> str:
        return ", ".join(dict.fromkeys(part.prompt_style for part in self.parts.values()))

    @property
    def notes(self) -> Sequence[str]:
        return [note for part in self.parts.values() for note in part.notes]

    def prompt_text(self, problem: Problem, tokenizer: Any) -> str:
        return self.parts[problem.extra["task"]].prompt_text(problem, tokenizer)

    def gold(self, problem: Problem) -> str:
        return self.parts[problem.extra["task"]].gold(problem)

    def with_tools(self, stop: tuple[str, ...], schemas: Sequence[Any], instructions: str, description: str) -> Mixture:
        parts = {label: part.with_tools(stop, schemas, instructions, description) for label, part in self.parts.items()}
        return replace(self, parts=parts, stop=self.stop + stop)


def _mix(problems: Mapping[str, Sequence[Problem]], weights: Mapping[str, float]) -> Sequence[Problem]:
    """Returns the problems of an epoch, task after task; the number of problems of a task is given by its weight."""
    epoch = max(len(problems[label]) / weight for label, weight in weights.items())
    epoch = min(epoch, EPOCH / sum(weights.values()))
    labels = list(weights)
    ends = list(accumulate(max(1, round(epoch * weight)) for weight in weights.values()))

    def make(index: int) -> Problem:
        which = bisect_right(ends, index)
        own, start = problems[labels[which]], ends[which - 1] if which else 0
        return _label(labels[which], own[(index - start) % len(own)])

    return Procedural(ends[-1], make)


def _interleave(problems: Mapping[str, Sequence[Problem]], weights: Mapping[str, float]) -> list[Problem]:
    """Returns all problems, interleaved so that the first n problems are roughly in proportion to the weights."""
    keyed = [
        ((place + 0.5) / weight, which, place)
        for which, (label, weight) in enumerate(weights.items())
        for place in range(len(problems[label]))
    ]
    labels = list(weights)
    return [_label(labels[which], problems[labels[which]][place]) for _, which, place in sorted(keyed)]


def _label(label: str, problem: Problem) -> Problem:
    return replace(problem, id=f"{label}/{problem.id}", extra={**problem.extra, "task": label})
