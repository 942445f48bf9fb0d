"""Rewards, functions of a response and its problem with options, and the scorer, which applies several of them.

A reward that fails costs its sample only, and is counted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict

from trimtab.trainer.sandbox.function_pool import Call, FunctionPool, Outcome, checked, describe
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


@dataclass(frozen=True, slots=True)
class Score:
    """The weighted sum and its unweighted parts by reward name. `total` is None exactly when `error` says why."""

    total: float | None
    parts: Mapping[str, float]
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Weighted:
    """A reward as the scorer uses it."""

    name: str
    weight: float
    timeout: float
    built: Built


class Scorer:
    """Applies rewards to samples; those that can hang or are a user's own run in worker processes (`FunctionPool`).

    Use it as a context manager or call `close()`; its processes also end with the last reference and with the trainer.
    """

    def __init__(self, rewards: Sequence[Weighted]) -> None:
        self.rewards = tuple(rewards)
        self._outside = [reward for reward in self.rewards if reward.built.isolated]
        self._pool = FunctionPool([_unpacked(reward.built) for reward in self._outside]) if self._outside else None

    def score(self, items: Sequence[tuple[Problem, Response | Completion]]) -> list[Score]:
        """One score per item, in order. Never raises for what a reward does.

        A response whose environment returned a reward has that one; a response whose environment failed has none.
        """
        known = [_of_environment(*item) for item in items]
        others = iter(self._score([item for item, score in zip(items, known, strict=True) if score is None]))
        return [next(others) if score is None else score for score in known]

    def _score(self, items: Sequence[tuple[Problem, Response | Completion]]) -> list[Score]:
        """Applies the rewards; one score for each item, in order."""
        samples = [
            (problem, answer if isinstance(answer, Response) else Response.of(answer)) for problem, answer in items
        ]
        outside = self._score_outside(samples)
        scores = []
        for index, sample in enumerate(samples):
            outcomes = {
                reward.name: outside[reward.name][index] if reward.built.isolated else _call(reward.built, *sample)
                for reward in self.rewards
            }
            scores.append(self._combine(sample[0], outcomes))
        return scores

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _score_outside(self, samples: Sequence[tuple[Problem, Response]]) -> dict[str, list[Outcome]]:
        if self._pool is None:
            return {}
        packed = [{"problem": _plain(problem), "response": asdict(response)} for problem, response in samples]
        calls = [
            Call(number, arguments, reward.timeout)
            for number, reward in enumerate(self._outside)
            for arguments in packed
        ]
        outcomes = iter(self._pool.run(calls))
        return {reward.name: [next(outcomes) for _ in samples] for reward in self._outside}

    def _combine(self, problem: Problem, outcomes: Mapping[str, Outcome]) -> Score:
        parts = {name: outcome.value for name, outcome in outcomes.items() if outcome.value is not None}
        failed = [f"reward {name!r} {outcome.error}" for name, outcome in outcomes.items() if outcome.error]
        if failed:
            return Score(None, parts, f"problem {problem.id!r}: {'; '.join(failed)}")
        total = checked(sum(reward.weight * parts[reward.name] for reward in self.rewards))
        if total.error:
            return Score(None, parts, f"problem {problem.id!r}: the weighted sum of the rewards {total.error}")
        return Score(total.value, parts)


def _of_environment(problem: Problem, answer: Response | Completion) -> Score | None:
    """Returns the score that follows from an episode's environment; None where the rewards decide."""
    outcome = answer.outcome if isinstance(answer, Completion) else None
    if outcome is not None and outcome.reward is not None:
        return Score(outcome.reward, {"environment": outcome.reward})
    if outcome is not None and outcome.failure is not None:
        return Score(None, {}, f"problem {problem.id!r}: the environment failed: {outcome.failure}")
    return None


def _call(built: Built, problem: Problem, response: Response) -> Outcome:
    try:
        return checked(built.function(response, problem))
    except Exception as error:
        return Outcome(error=describe(error))


def _plain(problem: Problem) -> dict[str, object]:
    return {"id": problem.id, "question": problem.question, "answer": problem.answer, "extra": dict(problem.extra)}


def _unpacked(built: Built):
    """The reward as the worker calls it: records rebuilt from what came through the pipe."""

    def call(problem: dict, response: dict):
        return built.function(Response(**response), Problem(**problem))

    return call
