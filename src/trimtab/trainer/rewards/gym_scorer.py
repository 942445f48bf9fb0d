"""The `reasoning-gym` reward: the scorer of the dataset.

It runs in a worker: several scorers pass the model's text to a symbolic parser, which can hang.
"""

from __future__ import annotations

import copy
import json
from functools import lru_cache
from typing import Any

import reasoning_gym
from pydantic import Field

from trimtab.trainer.rewards.reward import Built, Response, Reward
from trimtab.types import Problem, Task

ENTRY_KEYS = ("dataset", "config", "seed", "size", "index")


class GymScore(Reward):
    """The dataset's own score, usually 0..1 with partial credit. The problem must come from a reasoning-gym task."""

    tag: str | None = Field(None, description="score what is between <tag> and </tag>; default: the whole answer")

    def build(self, task: Task) -> Built:
        stops = task.stop

        def gym(response: Response, problem: Problem) -> float:
            answer = response.body(stops)
            if self.tag is not None:
                answer = _between(answer, self.tag)
            try:
                name, config, seed, size, index = (problem.extra[key] for key in ENTRY_KEYS)
            except KeyError:
                raise ValueError("the problem does not come from a reasoning-gym task") from None
            source, entry = _entry(name, json.dumps(config, sort_keys=True), seed, size, index)
            if entry["question"] != problem.question:
                raise ValueError(
                    "reasoning-gym no longer makes the same problem; use the version the task was built with"
                )
            return source.score_answer(answer, entry=copy.deepcopy(entry))

        return Built(gym, isolated=True)


def _between(text: str, tag: str) -> str | None:
    """Returns the content of the last complete <tag>...</tag>, None without one."""
    head, closing, _ = text.rpartition(f"</{tag}>")
    _, opening, inside = head.rpartition(f"<{tag}>")
    return inside.strip() if closing and opening else None


@lru_cache(maxsize=16)
def _source(dataset: str, config: str, seed: int, size: int) -> Any:
    return reasoning_gym.create_dataset(dataset, seed=seed, size=size, **json.loads(config))


@lru_cache(maxsize=512)
def _entry(dataset: str, config: str, seed: int, size: int, index: int) -> tuple[Any, Any]:
    source = _source(dataset, config, seed, size)
    return source, source[index]
