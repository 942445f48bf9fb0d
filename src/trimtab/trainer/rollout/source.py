"""The interface between training loop and rollouts, `RolloutSource`, and its synchronous implementation."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from trimtab.errors import RESUME, DivergedError, EngineDeadError, TrimtabError
from trimtab.trainer.engines.weight_transfer import checksum
from trimtab.trainer.rollout.buffer import Buffer
from trimtab.trainer.rollout.canary import Canary, CanaryPrediction
from trimtab.trainer.rollout.collector import Collector, Group
from trimtab.trainer.rollout.rollout_stats import RolloutStats
from trimtab.types import Engine

Weights = Iterable[tuple[str, Tensor]]
Result = TypeVar("Result")
# The rollout source's part of a checkpoint: tensors by section, JSON, and files.
SourceState = tuple[dict[str, dict[str, Tensor]], dict[str, Any], dict[str, bytes]]


class RolloutSource(Protocol):
    """Returns batches of scored groups and receives weights. All calls come from the trainer's thread."""

    collector: Collector

    @property
    def published(self) -> int:
        """Version of the weights that were last published to the engines."""
        ...

    def take(self, version: int, batches_left: int) -> tuple[list[Group], RolloutStats]:
        """Returns the groups of the next step and their statistics.

        Args:
            version: number of updates before the step.
            batches_left: batches that the run still needs, this one included.
        """
        ...

    def publish(self, weights: Weights, version: int, expected: CanaryPrediction | None = None) -> None:
        """Gives the engines new weights. `expected`: log-probs that the canary will check."""
        ...

    def evaluate_with(self, weights: Weights, version: int, function: Callable[[Engine], Result]) -> Result:
        """Returns the result of `function` with an engine that has exactly these weights, not quantized."""
        ...

    def state(self, updates: int) -> SourceState:
        """Returns the state for a checkpoint after `updates` updates."""
        ...

    def restore(self, tensors: Mapping[str, Mapping[str, Tensor]], meta: Any, files: Mapping[str, bytes]) -> None:
        """Restores `state()`, and drops what was sampled since.

        The caller may remove groups from `meta["ready"]`, and set `meta["halvings"]`: how often the bounds on the age
        of tokens, `max_lag` and `sync_every`, are halved.

        If the engines had the newest weights, the state has none: the caller must publish the weights first.
        """
        ...

    def close(self) -> None:
        """Stops all threads and engines. Idempotent."""
        ...


@dataclass
class BufferedSource(RolloutSource, ABC):
    """What the synchronous and the asynchronous source have in common: their buffer and their part of a checkpoint."""

    collector: Collector
    buffer: Buffer

    @abstractmethod
    def _weights(self) -> Weights:
        """Returns the weights that were last published."""

    @abstractmethod
    def _restore_weights(self, weights: Weights, version: int) -> None:
        """Gives the engines weights that `_weights` returned."""

    def state(self, updates: int) -> SourceState:
        """Returns the state. It includes the engines' weights only if they are older than the trainer's."""
        (meta, files), (more_meta, more_files) = self.buffer.state(), self.collector.responses.state()
        weights = {"engine": dict(self._weights())} if self.published != updates else {}
        return weights, {**meta, **more_meta, "published": self.published}, {**files, **more_files}

    def restore(self, tensors: Mapping[str, Mapping[str, Tensor]], meta: Any, files: Mapping[str, bytes]) -> None:
        self.buffer.restore(meta, files)
        self.collector.responses.restore(meta, files)
        if "engine" in tensors:
            self._restore_weights(tensors["engine"].items(), meta["published"])


@dataclass
class SyncSource(BufferedSource):
    """Generates each batch when the trainer asks for it, with the engine of this process."""

    engine: Engine
    canary: Canary | None = None

    @property
    def published(self) -> int:
        return self.engine.policy_version

    def take(self, version: int, batches_left: int) -> tuple[list[Group], RolloutStats]:
        trainer = self.collector.config.trainer
        self.buffer.schedule.wait(version, batches_left)
        for _ in range(trainer.refill_rounds if trainer.dynamic_sampling else 1):
            if missing := trainer.prompts - len(self.buffer.schedule.ready()):
                self._sample(missing)
        return self.buffer.take(version, partial=True)

    def _sample(self, count: int) -> None:
        start, decoded, prefilled = time.perf_counter(), self.engine.decoded_tokens, self.engine.prefilled_tokens
        request = self.buffer.schedule.reserve(count, self.engine.policy_version)
        generated = self.collector.responses.respond(request, self.engine.generate)
        generated.stats.decoded = self.engine.decoded_tokens - decoded
        generated.stats.prefilled = self.engine.prefilled_tokens - prefilled
        generated.stats.seconds_generating = time.perf_counter() - start
        self.buffer.deliver(generated, self.collector.score_groups(generated))

    def publish(self, weights: Weights, version: int, expected: CanaryPrediction | None = None) -> None:
        self.buffer.count(publish(self.engine, list(weights), version, self.canary, expected))

    def evaluate_with(self, weights: Weights, version: int, function: Callable[[Engine], Result]) -> Result:
        if self.published == version and not self.collector.config.engine.changes_weights:
            return function(self.engine)
        saved, saved_version = [(name, weight.clone()) for name, weight in self.engine.named_weights()], self.published
        self.engine.update_weights(weights, version, as_is=True)
        result = function(self.engine)
        self.engine.update_weights(saved, saved_version, as_is=True)
        return result

    def _weights(self) -> Weights:
        return self.engine.named_weights()

    def _restore_weights(self, weights: Weights, version: int) -> None:
        self.engine.update_weights(weights, version, as_is=True)

    def close(self) -> None:
        self.engine.close()


def publish(
    engine: Engine, weights: Weights, version: int, canary: Canary | None, expected: CanaryPrediction | None
) -> RolloutStats:
    """Gives an engine new weights and checks them; if that fails, repeats it once and reports it in the statistics.

    weights: must allow several iterations. expected: see `Canary.check`; None: the canary does not check this version.
    Raises `TrimtabError` if the second attempt fails too.
    """
    stats = RolloutStats()
    while True:
        engine.update_weights(weights, version)
        try:
            _compare_checksums(engine, weights, version)
            if canary is not None and expected is not None:
                canary.check(engine, expected)
            return stats
        except TrimtabError as error:
            if stats.republished or isinstance(error, DivergedError | EngineDeadError):
                raise
            stats.republished.append(f"{error}; published the weights again")


def _compare_checksums(engine: Engine, weights: Weights, version: int) -> None:
    """Raises `TrimtabError` if checksums of the engine's weights differ (`EmbeddedEngine.weight_checksums`)."""
    read = getattr(engine, "weight_checksums", None)
    used: dict[str, tuple[torch.dtype, int]] = read() if read else {}
    for name, weight in weights if used else ():
        if name in used and checksum(weight, used[name][0]) != used[name][1]:
            raise TrimtabError(
                f"the engine's weight {name!r} is not that of version {version}: the publication did not reach it; "
                f"start the engine again, then {RESUME}"
            )
