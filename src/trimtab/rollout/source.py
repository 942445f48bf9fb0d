"""The interface between training loop and rollouts, and its synchronous implementation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from torch import Tensor

from trimtab.rollout.buffer import Buffer
from trimtab.rollout.canary import Canary, Expected
from trimtab.rollout.collector import Collector, Group, RolloutStats
from trimtab.types import Engine

Weights = Iterable[tuple[str, Tensor]]
Found = TypeVar("Found")
# Tensors by section, JSON, and files: the feed's part of a checkpoint.
FeedState = tuple[dict[str, dict[str, Tensor]], dict[str, Any], dict[str, bytes]]


class RolloutSource(Protocol):
    """Batches out, weights in. All calls come from the trainer's thread."""

    collector: Collector

    @property
    def published(self) -> int:
        """Version of the weights last given to the engines."""
        ...

    def take(self, now: int, left: int) -> tuple[list[Group], RolloutStats]:
        """The groups of the step that starts after `now` updates; `left` batches of the run, this one included."""
        ...

    def publish(self, weights: Weights, version: int, expected: Expected | None = None) -> None:
        """Have the engines go on with these weights. `expected`: what the canary will look for."""
        ...

    def look(self, weights: Weights, version: int, through: Callable[[Engine], Found], *, rounded: bool) -> Found:
        """What `through` finds with an engine that holds exactly these weights; `rounded`: engines change theirs."""
        ...

    def state(self, updates: int) -> FeedState:
        """What a checkpoint after `updates` updates must hold."""
        ...

    def restore(self, tensors: Mapping[str, Mapping[str, Tensor]], meta: Any, files: Mapping[str, bytes]) -> None:
        """The inverse of `state`. Where the weights did not lag they are not part of it: publish them before."""
        ...

    def close(self) -> None:
        """End everything that runs for this feed, engines included. Idempotent."""
        ...


@dataclass
class SyncSource:
    """The engine of this process generates each batch when it is asked for, and as many groups as it lacks.

    `single`: every sample of the buffer must come from the one sampler in use (OAPL, Algorithm 1).
    """

    collector: Collector
    buffer: Buffer
    canary: Canary | None = None
    single: bool = False

    @property
    def engine(self) -> Engine:
        return self.collector.engine

    @property
    def published(self) -> int:
        return self.engine.policy_version

    def take(self, now: int, left: int) -> tuple[list[Group], RolloutStats]:
        trainer = self.collector.config.trainer
        self.buffer.schedule.wait(now, left)
        self.buffer.expire()
        if not trainer.dynamic_sampling:
            self._sample(trainer.prompts)
        for again in range(trainer.refill_rounds if trainer.dynamic_sampling else 0):
            if self.buffer.missing <= 0:
                break
            self._sample(math.ceil(self.buffer.missing * trainer.oversample), again=bool(again))
        return self.buffer.take(now, anyway=True)

    def _sample(self, count: int, *, again: bool = False) -> None:
        stats = RolloutStats(refilled=count if again else 0)
        request = self.buffer.reserve(count, self.engine.policy_version)
        self.buffer.deliver(request, self.collector.sample(request, stats), stats)

    def publish(self, weights: Weights, version: int, expected: Expected | None = None) -> None:
        if self.single:
            self.buffer.discard()
        self.engine.publish(weights, version)
        if self.canary is not None and expected is not None:
            self.canary.check(self.engine, expected)

    def look(self, weights: Weights, version: int, through: Callable[[Engine], Found], *, rounded: bool) -> Found:
        if self.published == version and not rounded:
            return through(self.engine)
        own, at = [(name, weight.clone()) for name, weight in self.engine.weights()], self.published
        self.engine.publish(weights, version, exact=True)
        found = through(self.engine)
        self.engine.publish(own, at, exact=True)
        return found

    def state(self, updates: int) -> FeedState:
        """The engine's weights are part of it only while they lag behind the trainer's."""
        meta, files = self.buffer.state()
        meta |= {"position": self.collector.stream.position, "published": self.published}
        if self.collector.prefixes is not None:
            files[PREFIXES], meta["prefixes"] = self.collector.prefixes.to_bytes(), self.collector.prefixes.meta()
        return {"engine": dict(self.engine.weights())} if self.published != updates else {}, meta, files

    def restore(self, tensors: Mapping[str, Mapping[str, Tensor]], meta: Any, files: Mapping[str, bytes]) -> None:
        self.buffer.restore(meta, files)
        stream = self.collector.stream
        stream.position = meta["position"]
        if self.collector.prefixes is not None:
            waiting = meta["prefixes"]["waiting"]
            prompts = stream.at(stream.position - waiting, waiting)
            self.collector.prefixes.restore(files[PREFIXES], meta["prefixes"], prompts)
        if "engine" in tensors:
            self.engine.publish(tensors["engine"].items(), meta["published"], exact=True)

    def close(self) -> None:
        self.engine.close()


PREFIXES = "prefixes.parquet"
