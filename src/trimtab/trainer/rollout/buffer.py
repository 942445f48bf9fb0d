"""The buffer of scored groups between generation and training."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from trimtab.runs import trajectories
from trimtab.trainer.config.training_sections import TrainerConfig
from trimtab.trainer.rollout.collector import Group, has_reward_variance, oldest
from trimtab.trainer.rollout.responses import GeneratedGroups
from trimtab.trainer.rollout.rollout_stats import RolloutStats
from trimtab.trainer.rollout.schedule import GroupRequest, Schedule

PENDING = "pending.parquet"


class Buffer:
    """Scored groups that wait for their batch, the schedule of all groups, and statistics since the last batch.

    Thread-safe. `changed` is the lock; it is notified whenever a waiting thread may be able to continue.

    relative_to_group: whether the advantage compares the responses to one prompt. If so, a group has no signal if its
    first rewards (by convention correctness) are equal. single_behavior: whether the buffer is emptied when the engines
    get new weights, so that afterwards only responses sampled with the new weights are consumed (OAPL, Algorithm 1).
    """

    def __init__(
        self, trainer: TrainerConfig, *, relative_to_group: bool = True, single_behavior: bool = False
    ) -> None:
        self.changed = threading.Condition()
        self._trainer, self._single_behavior = trainer, single_behavior
        self._halvings = 0
        self.schedule = Schedule(
            prompts=trainer.prompts,
            updates=trainer.updates_per_step,
            max_lag=self._max_lag(),
            ahead=bool(trainer.max_lag),
            max_no_signal=trainer.prompts * trainer.refill_rounds if trainer.dynamic_sampling else None,
        )
        self._relative_to_group = relative_to_group
        self._groups: dict[int, Group] = {}
        self._stats = RolloutStats()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Holds the lock inside, and then notifies the waiting threads."""
        with self.changed:
            yield
            self.changed.notify_all()

    def _max_lag(self) -> float:
        """Returns the largest age of a consumed token, in updates."""
        trainer, max_lag = self._trainer, math.inf
        if trainer.max_lag is not None:
            max_lag = max(min(trainer.max_lag, 1), trainer.max_lag >> self._halvings)
        if self._single_behavior:  # weights are at least `sync_every` updates old when the next ones are published
            max_lag = min(max_lag, max(1, (trainer.sync_every or 1) >> self._halvings) - 1)
        return max_lag

    def deliver(self, generated: GeneratedGroups, groups: Sequence[Group]) -> None:
        """Adds the scored groups of a request, except those that the schedule has dropped in the meantime."""
        stats = generated.stats
        with self.changing():
            for number, group in zip(generated.request.numbers, groups, strict=True):
                signal = has_reward_variance(group) or not self._relative_to_group
                stats.groups += 1
                stats.no_signal += not signal
                if self.schedule.deliver(number, oldest(group), signal=signal or not self._trainer.dynamic_sampling):
                    self._groups[number] = group
            self._stats.add(stats)

    def repeat(self, request: GroupRequest) -> None:
        """Schedules the groups to be generated again, because their engine was lost."""
        with self.changing():
            self.schedule.repeat(request)

    def count(self, stats: RolloutStats) -> None:
        """Adds to the statistics of the next batch."""
        with self.changed:
            self._stats.add(stats)

    def is_live(self, request: GroupRequest) -> bool:
        """Returns whether any group of a running request is still live."""
        with self.changed:
            return any(self.schedule.contains(number) for number in request.numbers)

    def expire(self) -> None:
        """Drops groups that are too old for every later batch, and counts their responses as stale."""
        with self.changing():
            for number in self.schedule.expire():
                group = self._groups.pop(number, None)
                # A group that is still being generated counts with all its samples.
                self._stats.stale += self._trainer.samples if group is None else len(group)

    def take(
        self, version: int, *, partial: bool = False, on_wait: Callable[[], None] | None = None
    ) -> tuple[list[Group], RolloutStats]:
        """Waits for a batch; returns its groups and the statistics since the last call.

        version: number of updates before the step that trains on the batch. partial: return the groups that are ready,
        without waiting for more. on_wait: called with the lock held before every wait; its exception ends the wait.
        """
        with self.changing():
            while (numbers := self.schedule.batch(partial=partial)) is None:
                if on_wait is not None:
                    on_wait()
                self.changed.wait()
            self.schedule.consume(numbers, version)
            groups = [self._groups.pop(number) for number in numbers]
            # The schedule has dropped all groups without signal.
            self._groups = {number: group for number, group in self._groups.items() if self.schedule.contains(number)}
            stats, self._stats = self._stats, RolloutStats()
        return groups, stats

    def state(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Returns the state for a checkpoint, as JSON and files: ready groups whole, other groups as numbers."""
        with self.changed:
            state: dict[str, Any] = {**self.schedule.state(), "stale": self._stats.stale, "halvings": self._halvings}
            rows = [trajectory for number in state["ready"] for trajectory in self._groups[number]]
            return state, {PENDING: trajectories.to_bytes(rows)} if rows else {}

    def restore(self, state: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
        """Restores `state()`. Groups that the caller removed from `state["ready"]` are dropped."""
        rows = trajectories.from_bytes(files[PENDING]) if state["ready"] and PENDING in files else []
        with self.changing():
            self._groups = {number: [] for number in state["ready"]}
            for row in rows:
                self._groups[row.group].append(row)
            self.schedule.restore(state, {number: oldest(group) for number, group in self._groups.items()})
            self._stats = RolloutStats(stale=state["stale"])
            self._halvings = state["halvings"]
            self.schedule.max_lag = self._max_lag()
