"""The base class of rewards: a function of a response and its problem, with options."""

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
    """A finished text, how it ended, and the number of its sampled tokens, which observations are not."""

    text: str
    finish: FinishReason
    tokens: int

    @classmethod
    def of(cls, completion: Completion) -> Response:
        return cls(completion.text, completion.finish_reason, completion.sampled_tokens)

    def body(self, stops: Iterable[str]) -> str:
        """Returns the text before the first stop string, without surrounding blanks.

        A stop string can lie inside a longer token ("\\n\\n"), so that text follows it that is not part of the answer.
        """
        text = self.text
        for stop in stops:
            text = text.partition(stop)[0]
        return text.strip()


RewardFunction = Callable[[Response, Problem], Any]


@dataclass(frozen=True, slots=True)
class Built:
    """A reward function, and whether it must run in a worker process (it can hang, or is a user's)."""

    function: RewardFunction
    isolated: bool


class Reward(BaseModel, ABC):
    """A built-in reward: its fields are the options a recipe may give."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @abstractmethod
    def build(self, task: Task) -> Built:
        """Returns the function that scores responses of `task`."""


def build_user_reward(function: Callable[..., Any], name: str) -> Built:
    """Returns a user's reward, `(completion: str, problem: Problem) -> float`, to run in a worker process."""
    check_arguments(function, f"reward {name!r}", {"completion": "str", "problem": "Problem"})

    def user(response: Response, problem: Problem) -> Any:
        return function(response.text, problem)

    return Built(user, isolated=True)
