"""A scorer that distributes samples over Ray actors, each of which has a local scorer.

Actors run user code in worker processes with time and memory limits, as a local scorer does. If an actor is lost, its
samples are scored once more by a new actor, and fail if that is lost, too. Imports no torch, because the actors fork
their worker processes, which should be small.
"""

from __future__ import annotations

import contextlib
import json
import tomllib
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from trimtab.errors import TrimtabError
from trimtab.trainer import rewards, tasks
from trimtab.trainer.cluster.actors import ActorLost, ActorSlot, get_result, kill_actor, use_working_directory
from trimtab.trainer.config import Config, parse_config
from trimtab.trainer.rewards import Response, Score, Scorer, Weighted
from trimtab.trainer.rewards.scorer import Item
from trimtab.trainer.sandbox.function_pool import SUPERVISOR_TIMEOUT
from trimtab.types import Problem, RewardSpec

LOST_TWICE = "was lost twice: the actor that runs rewards died or did not answer"


class RewardHost:
    """The actor. It builds the rewards of a recipe itself, so that no function is sent."""

    def start(self, recipe: str, folder: str) -> None:
        use_working_directory(folder)
        config = parse_config(tomllib.loads(recipe), "recipe")
        task = tasks.build(config.task.name, **config.task.keywords)
        task = tasks.with_max_tokens(task, config.sampling.max_tokens)
        self._scorer = rewards.build([RewardSpec(r.name, r.weight, r.timeout, r.keywords) for r in config.reward], task)

    def score(self, items: str) -> str:
        pairs = [(Problem(**problem), Response(**response)) for problem, response in json.loads(items)]
        return json.dumps([asdict(score) for score in self._scorer.score(pairs)])

    def close(self) -> None:
        self._scorer.close()


class RayScorer(Scorer):
    """Distributes samples over reward actors, one per slot. `close()` ends them."""

    def __init__(self, weighted: Sequence[Weighted], config: Config, folder: str, slots: Sequence[ActorSlot]) -> None:
        self.rewards = tuple(weighted)
        self._recipe = config.dump()
        self._folder = folder
        self._start_timeout = config.ray.start_timeout
        self._slots = list(slots)
        self._hosts: list[Any] = [slot.start(RewardHost) for slot in slots]
        self._start_hosts(*range(len(self._hosts)))

    def _score(self, items: Sequence[Item]) -> list[Score]:
        """Returns one score per item, in order. Errors of a reward and a lost actor are in the scores.

        Raises:
            TrimtabError: an actor was lost and its replacement did not start.
        """
        packed = [_encode_sample(*item) for item in items]
        sendable = [index for index, sample in enumerate(packed) if sample is not None]
        count = len(self._hosts)
        parts = {number: part for number in range(count) if (part := sendable[number::count])}
        scores = {
            index: Score(None, {}, f"problem {problem.id!r}: its `extra` is not JSON and cannot be sent to an actor")
            for index, (problem, _) in enumerate(items)
            if packed[index] is None
        }
        lost = self._score_parts(parts, packed, scores)
        for number in self._score_parts(lost, packed, scores):
            for index in lost[number]:
                scores[index] = Score(None, {}, f"problem {items[index][0].id!r}: {LOST_TWICE}")
        return [scores[index] for index in range(len(items))]

    def close(self) -> None:
        hosts, self._hosts = self._hosts, []
        closing = [(host, host.close.remote()) for host in hosts]
        for host, closed in closing:
            with contextlib.suppress(ActorLost):
                get_result(closed, timeout=5.0)
            kill_actor(host)

    def _score_parts(
        self, parts: dict[int, list[int]], packed: Sequence[str | None], scores: dict[int, Score]
    ) -> dict[int, list[int]]:
        """Writes the scores of each part into `scores`; replaces lost actors and returns their parts."""
        longest = sum(reward.timeout for reward in self.rewards)
        calls = {
            number: self._hosts[number].score.remote(f"[{', '.join(packed[index] or '' for index in part)}]")
            for number, part in parts.items()
        }
        lost = {}
        for number, call in calls.items():
            part = parts[number]
            try:
                results = json.loads(get_result(call, timeout=longest * len(part) + 2 * SUPERVISOR_TIMEOUT))
            except ActorLost:
                kill_actor(self._hosts[number])
                self._hosts[number] = self._slots[number].start(RewardHost)
                self._start_hosts(number)
                lost[number] = part
                continue
            for index, score in zip(part, results, strict=True):
                scores[index] = Score(**score)
        return lost

    def _start_hosts(self, *numbers: int) -> None:
        starting = [self._hosts[number].start.remote(self._recipe, self._folder) for number in numbers]
        for started in starting:
            try:
                get_result(started, self._start_timeout)
            except ActorLost as error:
                raise TrimtabError(f"a reward actor did not start: {error}") from None


def _encode_sample(problem: Problem, answer: Any) -> str | None:
    """Returns a sample as JSON, or None if its problem is not JSON."""
    response = answer if isinstance(answer, Response) else Response.of(answer)
    plain = {"id": problem.id, "question": problem.question, "answer": problem.answer, "extra": dict(problem.extra)}
    try:
        return json.dumps([plain, asdict(response)])
    except (TypeError, ValueError):
        return None
