"""Stand-ins that let every rank run the same training loop.

Rank 0 is the leader: it has the engines, the processes of rewards and tools, the run directory and the observer. The
other ranks have stand-ins with the same interface, which receive the leader's data and write nothing.

    with join():
        run = run_directory(folder, partial(RunDirectory.create, folder, recipe))
        source = shared_source(collector, <builds the source of one process>)
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from trimtab.runs import trajectories
from trimtab.runs.directory import RunDirectory
from trimtab.trainer.ranks import RankGroup, current_ranks
from trimtab.trainer.rollout.canary import CanaryPrediction
from trimtab.trainer.rollout.collector import Collector, Group
from trimtab.trainer.rollout.rollout_stats import RolloutStats
from trimtab.trainer.rollout.source import Result, RolloutSource, SourceState, Weights
from trimtab.types import Engine


def run_directory(folder: Path, make: Callable[[], RunDirectory]) -> RunDirectory:
    """Returns `make()` on the leader, a view of the run directory on other ranks. All ranks raise errors of `make`."""
    ranks = current_ranks()
    directory = ranks.run_on_all_ranks(lambda: make() if ranks.is_leader else None)
    return FollowerRunDirectory(folder) if directory is None else directory


def shared_source(collector: Collector, make: Callable[[], RolloutSource]) -> RolloutSource:
    """Returns the rollout source that `make` builds on the leader; with several ranks, all receive its batches."""
    ranks = current_ranks()
    source = make() if ranks.is_leader else None
    return SharedSource(collector, source, ranks) if source is None or ranks.size > 1 else source


class SharedSource:
    """The `RolloutSource` of each of several ranks, which all get the batches and results of the leader's `source`.

    `source` is None on the other ranks. All ranks iterate over published weights: gathering shards needs every rank.
    """

    def __init__(self, collector: Collector, source: RolloutSource | None, ranks: RankGroup) -> None:
        self.collector = collector
        self.published = -1
        self._source, self._ranks = source, ranks

    def take(self, version: int, batches_left: int) -> tuple[list[Group], RolloutStats]:
        if self._source is not None:
            groups, stats = self._source.take(version, batches_left)
            self._ranks.broadcast(trajectories.to_bytes([trajectory for group in groups for trajectory in group]))
            return groups, stats
        received: dict[int, Group] = {}
        for trajectory in trajectories.from_bytes(self._ranks.broadcast(b"")):
            received.setdefault(trajectory.group, []).append(trajectory)
        return list(received.values()), RolloutStats()

    def publish(self, weights: Weights, version: int, expected: CanaryPrediction | None = None) -> None:
        if self._source is not None:
            self._source.publish(weights, version, expected)
        else:
            deque(weights, maxlen=0)
        self.published = version

    def evaluate_with(self, weights: Weights, version: int, function: Callable[[Engine], Result]) -> Result:
        """The result of `function` must be JSON: it is sent to the other ranks."""
        if self._source is None:
            if self._ranks.broadcast_bool(False):
                deque(weights, maxlen=0)
            return json.loads(self._ranks.broadcast(b""))
        needed = False

        def announced_weights() -> Iterator[tuple[str, Tensor]]:
            nonlocal needed
            needed = True
            self._ranks.broadcast_bool(True)
            yield from weights

        result = self._source.evaluate_with(announced_weights(), version, function)
        if not needed:
            self._ranks.broadcast_bool(False)
        self._ranks.broadcast(json.dumps(result).encode())
        return result

    def state(self, updates: int) -> SourceState:
        """Returns the leader's state; on other ranks empty sections of the same names."""
        if self._source is not None:
            return self._source.state(updates)
        return {"engine": {}} if self.published != updates else {}, {}, {}

    def restore(self, tensors: Mapping[str, Mapping[str, Tensor]], meta: Any, files: Mapping[str, bytes]) -> None:
        if self._source is not None:
            self._source.restore(tensors, meta, files)
        if "engine" in tensors:
            self.published = meta["published"]

    def close(self) -> None:
        if self._source is not None:
            self._source.close()


class FollowerRunDirectory(RunDirectory):
    """The leader's run directory as other ranks see it: read-only and not locked."""

    writes = False

    def _take_lock(self) -> None:
        pass

    def log(self, metrics: Mapping[str, Any]) -> None:
        pass

    def metrics(self) -> list[dict[str, Any]]:
        return []

    def truncate_after(self, step: int) -> None:
        pass
