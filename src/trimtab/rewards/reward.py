"""What a reward is: a function of a response and its problem, with options."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict

from trimtab.plugins import check_arguments
from trimtab.types import Completion, FinishReason, Problem, Task


@dataclass(frozen=True, slots=True)
class Response:
    """A finished text, how it ended, and its length in tokens."""

    text: str
    finish: FinishReason
    tokens: int

    @classmethod
    def of(cls, completion: Completion) -> Response:
        return cls(completion.text, completion.finish, len(completion.response_ids))

    def body(self, stops: Iterable[str]) -> str:
        """The text before the first stop string, without surrounding blanks.

        A stop string can sit inside a longer token ("\\n\\n"), so text after it is no part of the answer.
        """
        text = self.text
        for stop in stops:
            text = text.partition(stop)[0]
        return text.strip()


RewardFunction = Callable[[Response, Problem], Any]


@dataclass(frozen=True, slots=True)
class Built:
    """A reward function and whether it may only run in a worker process (it can hang, or is not ours)."""

    function: RewardFunction
    isolated: bool


class Reward(BaseModel, ABC):
    """A built-in reward: its fields are the options a recipe may give."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @abstractmethod
    def build(self, task: Task) -> Built:
        """The function that scores responses of `task`."""


def build_user_reward(function: Callable[..., Any], name: str) -> Built:
    """A user's own reward, `(completion: str, problem: Problem) -> float`, to run in a worker process.

    Raises `TrimtabError` when it takes other arguments.
    """
    check_arguments(function, f"reward {name!r}", {"completion": "str", "problem": "Problem"})

    def user(response: Response, problem: Problem) -> Any:
        return function(response.text, problem)

    return Built(user, isolated=True)
