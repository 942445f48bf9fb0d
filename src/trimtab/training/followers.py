"""What a run needs on several ranks so that the loop is the same on all of them.

Every rank runs the same `Trainer`. Rank 0 leads: it has the engines, the rewards, the run directory and the
observer. The others have stand-ins with the same interface, which receive what rank 0 found out and write nothing.

    with join():
        run = run_directory(folder, partial(RunDirectory.create, folder, recipe))
        model = spread(model, config)
        feed = shared_feed(collector, <makes the feed of one process>)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.config import Config, ShardingConfig
from trimtab.errors import TrimtabError
from trimtab.models.sharding import shard
from trimtab.rollout.canary import Expected
from trimtab.rollout.collector import Collector, Group, RolloutStats
from trimtab.rollout.source import FeedState, Found, RolloutSource, Weights
from trimtab.runs import trajectories
from trimtab.runs.directory import RunDirectory
from trimtab.training.ranks import Ranks, here
from trimtab.types import Engine

_TAKEN, _LEFT = b"taken", b"left"


def check_sharding(config: Config) -> None:
    """Refuse options of sharding where nothing is sharded: `offload` would save no memory, without a word."""
    ranks = config.ray.trainers if config.placement == "ray" else here().size
    if ranks == 1 and config.sharding != ShardingConfig():
        raise TrimtabError(
            "[sharding] has no effect with one process: start several with torchrun (or set ray.trainers), or leave it "
            "out"
        )


def spread(model: nn.Module, config: Config) -> nn.Module:
    """Shard `model` over the ranks as `[sharding]` says, in place; one process keeps it as it is. Returns it.

    Call it before the optimizer is built. The weights are the leader's; on other ranks the model may be empty.
    """
    ranks = here()
    if ranks.size > 1:
        from torch.distributed.device_mesh import init_device_mesh

        assert ranks.device is not None
        shard(
            model,
            init_device_mesh(ranks.device.type, (ranks.size,)),
            compute=torch.bfloat16 if config.model.autocast == "bfloat16" else None,
            offload=config.sharding.offload,
            reshard=config.sharding.reshard,
        )
    return model


def run_directory(folder: Path, make: Callable[[], RunDirectory]) -> RunDirectory:
    """What `make` makes of `folder`, on the leader; on the other ranks a view of it. An error of `make` stops all."""
    ranks = here()
    made = ranks.together(lambda: make() if ranks.leads else None)
    return FollowedRun(folder) if made is None else made


def shared_feed(collector: Collector, make: Callable[[], RolloutSource]) -> RolloutSource:
    """The feed that `make` makes, on the leader alone, shared with the other ranks."""
    ranks = here()
    if not ranks.leads:
        return Following(collector, ranks)
    return make() if ranks.size == 1 else Leading(make(), ranks)


class Leading:
    """The leader's feed, which tells the other ranks what they cannot know. See `feed.RolloutSource`."""

    def __init__(self, feed: RolloutSource, ranks: Ranks) -> None:
        self._feed, self._ranks = feed, ranks
        self.collector = feed.collector

    @property
    def published(self) -> int:
        return self._feed.published

    def take(self, now: int, left: int) -> tuple[list[Group], RolloutStats]:
        groups, stats = self._feed.take(now, left)
        self._ranks.broadcast(trajectories.to_bytes([trajectory for group in groups for trajectory in group]))
        return groups, stats

    def publish(self, weights: Weights, version: int, expected: Expected | None = None) -> None:
        self._feed.publish(weights, version, expected)

    def look(self, weights: Weights, version: int, through: Callable[[Engine], Found], *, rounded: bool) -> Found:
        """What `through` finds must be JSON: the other ranks are told it."""
        needed = False

        def told() -> Iterator[tuple[str, Tensor]]:
            nonlocal needed
            needed = True
            self._ranks.broadcast(_TAKEN)
            yield from weights

        found = self._feed.look(told(), version, through, rounded=rounded)
        if not needed:
            self._ranks.broadcast(_LEFT)
        self._ranks.broadcast(json.dumps(found).encode())
        return found

    def state(self, updates: int) -> FeedState:
        return self._feed.state(updates)

    def restore(self, tensors: Mapping[str, Mapping[str, Tensor]], meta: Any, files: Mapping[str, bytes]) -> None:
        self._feed.restore(tensors, meta, files)

    def close(self) -> None:
        self._feed.close()


class Following:
    """The feed of every other rank: batches as the leader took them, and no engine. See `feed.RolloutSource`.

    Weights are taken in all the same, because putting one together needs every rank.
    """

    def __init__(self, collector: Collector, ranks: Ranks) -> None:
        self.collector = collector
        self.published = -1
        self._ranks = ranks

    def take(self, now: int, left: int) -> tuple[list[Group], RolloutStats]:  # noqa: ARG002
        groups: dict[int, Group] = {}
        for trajectory in trajectories.from_bytes(self._ranks.broadcast(b"")):
            groups.setdefault(trajectory.group, []).append(trajectory)
        return list(groups.values()), RolloutStats()

    def publish(self, weights: Weights, version: int, expected: Expected | None = None) -> None:  # noqa: ARG002
        _gather(weights)
        self.published = version

    def look(self, weights: Weights, version: int, through: Callable[[Engine], Found], *, rounded: bool) -> Found:  # noqa: ARG002
        if self._ranks.broadcast(b"") == _TAKEN:
            _gather(weights)
        return json.loads(self._ranks.broadcast(b""))

    def state(self, updates: int) -> FeedState:
        """The same sections as the leader's, without content."""
        return {"engine": {}} if self.published != updates else {}, {}, {}

    def restore(self, tensors: Mapping[str, Mapping[str, Tensor]], meta: Any, files: Mapping[str, bytes]) -> None:  # noqa: ARG002
        self.published = meta["published"]

    def close(self) -> None:
        pass


class NoEngine:
    """In the place of an engine on ranks that have none: nothing there may sample."""

    policy_version = decoded = prefilled = 0

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002
        raise RuntimeError("only rank 0 has engines")

    generate = publish = weights = recover = close = _refuse


class FollowedRun(RunDirectory):
    """The leader's run directory as the other ranks see it: readable, never written, not locked."""

    writes = False

    def _take(self) -> None:
        pass

    def log(self, metrics: Mapping[str, Any]) -> None:
        pass

    def metrics(self) -> list[dict[str, Any]]:
        return []

    def truncate_after(self, step: int) -> None:
        pass

    def close(self) -> None:
        pass

    def _abandon(self) -> None:
        pass


def _gather(weights: Iterable[tuple[str, Tensor]]) -> None:
    for _ in weights:
        pass
