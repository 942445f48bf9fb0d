"""Rewards: functions of a response and its problem. `build(specs, task)` returns a `Scorer`.

If a reward fails, only its sample is lost, and the failure is counted. See docs/reference-tasks.md.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict

from trimtab.errors import TrimtabError
from trimtab.plugins import check_arguments, load_function
from trimtab.trainer.registry import Registry
from trimtab.trainer.sandbox.function_pool import FunctionCall, FunctionPool, Outcome, check_value, describe_error
from trimtab.types import Completion, FinishReason, Problem, RewardSpec, Task

KINDS = Registry(
    "reward",
    {
        "exact": "rewards.builtin:Exact",
        "numeric": "rewards.builtin:Numeric",
        "math": "rewards.builtin:MathEqual",
        "format": "rewards.builtin:Format",
        "overlong": "rewards.builtin:Overlong",
        "reasoning-gym": "rewards.builtin:GymScore",
        "python-tests": "rewards.builtin:PythonTests",
        "by-task": "rewards.builtin:ByTask",
    },
    "write your own as module:function",
)
Spec = RewardSpec | tuple[str | Callable[..., Any], float, float, Mapping[str, Any]]


def build(specs: Sequence[Spec], task: Task) -> Scorer:
    """Returns a scorer for these rewards, or for the task's rewards if `specs` is empty.

    Each spec is `(name or callable, weight, timeout in seconds, options)`. By convention, the first reward decides
    whether a response is correct. Call this before torch and models are loaded: it forks a process for user rewards.

    Raises `TrimtabError` for an unknown reward or option (suggesting the nearest), and for a user function that cannot
    be imported.
    """
    return Scorer(build_weighted(specs, task))


def build_weighted(specs: Sequence[Spec], task: Task) -> list[Weighted]:
    """Returns the rewards of `build`, without starting processes for them. Raises what `build` raises."""
    entries: list[Weighted] = []
    labels: list[str] = []
    for spec in specs or task.rewards:
        given = RewardSpec(*spec)
        label = given.name if isinstance(given.name, str) else getattr(given.name, "__name__", "reward")
        labels.append(label)
        if not math.isfinite(given.weight):
            raise TrimtabError(f"reward {label!r}: weight must be a finite number, got {given.weight}")
        if not 0 < given.timeout < math.inf:
            raise TrimtabError(f"reward {label!r}: timeout must be a positive number of seconds, got {given.timeout}")
        name = f"{label}-{count}" if (count := labels.count(label)) > 1 else label
        entries.append(Weighted(name, given.weight, given.timeout, _build_reward(label, given, task)))
    return entries


def _build_reward(label: str, spec: RewardSpec, task: Task) -> Built:
    if not isinstance(spec.name, str) or ":" in spec.name:
        if spec.options:
            given = ", ".join(map(repr, spec.options))
            raise TrimtabError(f"reward {label!r}: your own function takes no options, got {given}")
        function = load_function(spec.name, "reward") if isinstance(spec.name, str) else spec.name
        check_arguments(function, f"reward {label!r}", {"completion": "str", "problem": "Problem"})
        return Built(lambda response, problem: function(response.text, problem), isolated=True)
    return KINDS.read(spec.name, spec.options).build(task)


@dataclass(frozen=True, slots=True)
class Response:
    """A finished response, as rewards see it."""

    text: str
    finish: FinishReason
    tokens: int  # number of sampled tokens, without observations

    @classmethod
    def of(cls, completion: Completion) -> Response:
        return cls(completion.text, completion.finish_reason, completion.sampled_tokens)

    def body(self, stops: Iterable[str]) -> str:
        """Returns the text before the first stop string, without surrounding white space.

        Text can follow a stop string because a stop string can be part of a longer token ("\\n\\n").
        """
        text = self.text
        for stop in filter(None, stops):
            text = text.partition(stop)[0]
        return text.strip()


RewardFunction = Callable[[Response, Problem], Any]


@dataclass(frozen=True, slots=True)
class Built:
    """A reward function as it is called."""

    function: RewardFunction
    isolated: bool  # run it in a worker process, because it can hang or is a user function


class Reward(BaseModel, ABC):
    """Base class of built-in rewards. The fields are the options that a recipe may set."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @abstractmethod
    def build(self, task: Task) -> Built:
        """Returns the function that scores responses of `task`."""


@dataclass(frozen=True, slots=True)
class Score:
    """The score of one sample."""

    total: float | None  # the weighted sum; None if `error` is set
    parts: Mapping[str, float]  # unweighted, by the name of the reward
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Weighted:
    """A reward as the scorer uses it."""

    name: str
    weight: float
    timeout: float
    built: Built


class Scorer:
    """Applies rewards to samples. Rewards that can hang and user functions run in worker processes (`FunctionPool`).

    Use it as a context manager, or call `close()`. The processes also end if the scorer is garbage-collected, and if
    the trainer exits.
    """

    def __init__(self, rewards: Sequence[Weighted]) -> None:
        self.rewards = tuple(rewards)
        self._outside = [reward for reward in self.rewards if reward.built.isolated]
        self._pool = FunctionPool([_unpack(reward.built) for reward in self._outside]) if self._outside else None

    def score(self, items: Sequence[tuple[Problem, Response | Completion]]) -> list[Score]:
        """Returns one score per item, in order. An error in a reward is returned in its score, never raised.

        If an episode's environment returned a reward, that is the score; if the environment failed, it is an error.
        """
        known = [_read_environment_score(*item) for item in items]
        samples = [
            (problem, answer if isinstance(answer, Response) else Response.of(answer))
            for (problem, answer), score in zip(items, known, strict=True)
            if score is None
        ]
        outcomes = self._run_rewards(samples)
        scores = (
            self._combine(problem, {reward.name: outcomes[reward.name][index] for reward in self.rewards})
            for index, (problem, _) in enumerate(samples)
        )
        return [next(scores) if score is None else score for score in known]

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run_rewards(self, samples: Sequence[tuple[Problem, Response]]) -> dict[str, list[Outcome]]:
        """Returns the outcomes of each reward by its name, in the order of the samples."""
        inside = [reward for reward in self.rewards if not reward.built.isolated]
        found = {reward.name: [_call_here(reward.built, *sample) for sample in samples] for reward in inside}
        if self._pool is None:
            return found
        packed = [{"problem": _pack(problem), "response": asdict(response)} for problem, response in samples]
        calls = [
            FunctionCall(number, arguments, reward.timeout)
            for number, reward in enumerate(self._outside)
            for arguments in packed
        ]
        outcomes = iter(self._pool.run(calls))
        return found | {reward.name: [next(outcomes) for _ in samples] for reward in self._outside}

    def _combine(self, problem: Problem, outcomes: Mapping[str, Outcome]) -> Score:
        parts = {name: outcome.value for name, outcome in outcomes.items() if outcome.value is not None}
        failed = [f"reward {name!r} {outcome.error}" for name, outcome in outcomes.items() if outcome.error]
        if failed:
            return Score(None, parts, f"problem {problem.id!r}: {'; '.join(failed)}")
        total = check_value(sum(reward.weight * parts[reward.name] for reward in self.rewards))
        if total.error:
            return Score(None, parts, f"problem {problem.id!r}: the weighted sum of the rewards {total.error}")
        return Score(total.value, parts)


def _read_environment_score(problem: Problem, answer: Response | Completion) -> Score | None:
    """Returns the score given by the environment of an episode, or None if the rewards have to score the response."""
    outcome = answer.outcome if isinstance(answer, Completion) else None
    if outcome is not None and outcome.reward is not None:
        return Score(outcome.reward, {"environment": outcome.reward})
    if outcome is not None and outcome.failure is not None:
        return Score(None, {}, f"problem {problem.id!r}: the environment failed: {outcome.failure}")
    return None


def _call_here(built: Built, problem: Problem, response: Response) -> Outcome:
    try:
        return check_value(built.function(response, problem))
    except Exception as error:
        return Outcome(error=describe_error(error))


def _pack(problem: Problem) -> dict[str, object]:
    return {"id": problem.id, "question": problem.question, "answer": problem.answer, "extra": dict(problem.extra)}


def _unpack(built: Built):
    """Returns the reward function for a worker process: it rebuilds the arguments from JSON."""

    def call(problem: dict, response: dict):
        return built.function(Response(**response), Problem(**problem))

    return call
