"""A scorer that distributes samples over actors, each with a scorer of its own.

Inside an actor nothing changes: what can hang or is a user's own runs in worker processes with time and memory limits.
Here a whole actor may be lost as well; its samples go to its successor once, and fail visibly if that is lost too.
No torch here: the actors fork their worker processes, and those should be small.
"""

from __future__ import annotations

import contextlib
import json
import tomllib
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from trimtab import rewards, tasks
from trimtab.cluster.actors import ActorLost, ActorSlot, ask, end, enter
from trimtab.config import Config, parse_config
from trimtab.errors import TrimtabError
from trimtab.rewards import Response, Score, Scorer, Weighted
from trimtab.rewards.scorer import Item
from trimtab.sandbox.pool import GRACE
from trimtab.types import Problem, RewardSpec

LOST = "was lost twice: the actor that runs rewards died or did not answer"


class RewardHost:
    """The actor. Its rewards are those of a recipe, built here: no function travels."""

    def start(self, recipe: str, folder: str) -> None:
        enter(folder)
        config = parse_config(tomllib.loads(recipe), "recipe")
        task = tasks.build(config.task.name, **config.task.keywords)
        self._scorer = rewards.build([RewardSpec(r.name, r.weight, r.timeout, r.keywords) for r in config.reward], task)

    def score(self, items: str) -> str:
        pairs = [(Problem(**problem), Response(**response)) for problem, response in json.loads(items)]
        return json.dumps([asdict(score) for score in self._scorer.score(pairs)])

    def close(self) -> None:
        self._scorer.close()


class RayScorer(Scorer):
    """Deals samples over reward actors, one in each seat. `close()` ends them."""

    def __init__(self, weighted: Sequence[Weighted], config: Config, folder: str, seats: Sequence[ActorSlot]) -> None:
        self.rewards = tuple(weighted)
        self._recipe = config.dump()
        self._folder = folder
        self._patience = config.ray.start_timeout
        self._seats = list(seats)
        self._hosts: list[Any] = [seat.start(RewardHost) for seat in seats]
        self._begin(*range(len(self._hosts)))

    def _score(self, items: Sequence[Item]) -> list[Score]:
        """One score per item, in order. Never raises for what a reward does, or for one lost actor.

        Raises:
            TrimtabError: an actor was lost and its successor did not start.
        """
        packed = [_pack(*item) for item in items]
        travelling = [index for index, sample in enumerate(packed) if sample is not None]
        edges = [len(travelling) * part // len(self._hosts) for part in range(len(self._hosts) + 1)]
        parts = {
            number: travelling[edges[number] : edges[number + 1]]
            for number in range(len(self._hosts))
            if edges[number] < edges[number + 1]
        }
        scores = [
            Score(None, {}, f"problem {problem.id!r}: its `extra` is not JSON and cannot travel to a reward actor")
            for problem, _ in items
        ]
        lost = self._ask(parts, packed, scores)
        for number in self._ask(lost, packed, scores):
            for index in lost[number]:
                scores[index] = Score(None, {}, f"problem {items[index][0].id!r}: {LOST}")
        return scores

    def close(self) -> None:
        hosts, self._hosts = self._hosts, []
        closing = [(host, host.close.remote()) for host in hosts]
        for host, closed in closing:
            with contextlib.suppress(ActorLost):
                ask(closed, patience=5.0)
            end(host)

    def _ask(
        self, parts: dict[int, list[int]], packed: Sequence[str | None], scores: list[Score]
    ) -> dict[int, list[int]]:
        """Fill in `scores` for the samples of each part; returns the parts whose actor was lost, which is replaced."""
        longest = sum(reward.timeout for reward in self.rewards)
        asked = {
            number: self._hosts[number].score.remote(f"[{', '.join(packed[index] or '' for index in part)}]")
            for number, part in parts.items()
        }
        lost = {}
        for number, answer in asked.items():
            part = parts[number]
            try:
                found = json.loads(ask(answer, patience=longest * len(part) + 2 * GRACE))
            except ActorLost:
                end(self._hosts[number])
                self._hosts[number] = self._seats[number].start(RewardHost)
                self._begin(number)
                lost[number] = part
                continue
            for index, score in zip(part, found, strict=True):
                scores[index] = Score(**score)
        return lost

    def _begin(self, *numbers: int) -> None:
        starting = [self._hosts[number].start.remote(self._recipe, self._folder) for number in numbers]
        for started in starting:
            try:
                ask(started, self._patience)
            except ActorLost as error:
                raise TrimtabError(f"a reward actor did not start: {error}") from None


def _pack(problem: Problem, answer: Any) -> str | None:
    """A sample as JSON; None where the problem cannot travel."""
    response = answer if isinstance(answer, Response) else Response.of(answer)
    plain = {"id": problem.id, "question": problem.question, "answer": problem.answer, "extra": dict(problem.extra)}
    try:
        return json.dumps([plain, asdict(response)])
    except (TypeError, ValueError):
        return None
