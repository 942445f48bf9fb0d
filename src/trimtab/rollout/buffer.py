"""The buffer of scored groups between generation and training."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trimtab.config.schema import TrainerConfig
from trimtab.rollout.collector import Group, RolloutStats, has_reward_variance, oldest
from trimtab.rollout.schedule import STALE, Request, Schedule
from trimtab.runs import trajectories

PENDING = "pending.parquet"


class Buffer:
    """Groups that are ready, the books on all others, and what collecting them cost since the last batch.

    Any thread may call any method. `changed` is notified whenever a waiting thread may be able to go on.
    """

    def __init__(self, trainer: TrainerConfig) -> None:
        self.changed = threading.Condition()
        self.schedule = Schedule(
            prompts=trainer.prompts,
            updates=trainer.minibatches * trainer.epochs,
            max_lag=trainer.max_lag,
            in_order=trainer.in_flight != "discard",
            patience=trainer.prompts * trainer.refill_rounds if trainer.dynamic_sampling else None,
        )
        self._dynamic, self._samples = trainer.dynamic_sampling, trainer.samples
        self._groups: dict[int, Group] = {}
        self._stats = RolloutStats()

    def reserve(self, count: int, version: int) -> Request:
        """The next `count` groups, to be generated in step."""
        with self.changed:
            return self.schedule.reserve(count, version)

    def deliver(self, request: Request, groups: Sequence[Group], stats: RolloutStats) -> None:
        """What was generated and scored, group by group; what the schedule gave up in the meantime is left out."""
        with self.changed:
            for number, group in zip(request.numbers, groups, strict=True):
                signal = has_reward_variance(group)
                stats.groups += 1
                stats.no_signal += not signal
                if self.schedule.deliver(number, oldest(group), signal=signal or not self._dynamic):
                    self._groups[number] = group
                else:
                    stats.discarded_lengths += [len(trajectory) for trajectory in group]
            self._stats.add(stats)
            self.changed.notify_all()

    def repeat(self, request: Request) -> None:
        """These groups must be generated again."""
        with self.changed:
            self.schedule.repeat(request)
            self.changed.notify_all()

    def count(self, stats: RolloutStats) -> None:
        """Add to the statistics of the next batch."""
        with self.changed:
            self._stats.add(stats)

    def wanted(self, request: Request) -> bool:
        """Whether any group of a running request is still live."""
        with self.changed:
            return any(self.schedule.holds(number) for number in request.numbers)

    @property
    def missing(self) -> int:
        """Ready groups the next batch still lacks."""
        return self.schedule.prompts - len(self.schedule.ready())

    def expire(self) -> None:
        """Drop what is too old for every batch to come, and count its responses as stale."""
        with self.changed:
            for number in self.schedule.expire():
                group = self._groups.pop(number, None)
                # What is still being written is counted whole: none of its responses will be trained on.
                self._stats.stale += self._samples if group is None else len(group)
                self._stats.discarded_lengths += [len(trajectory) for trajectory in group or ()]
            self.changed.notify_all()

    def discard(self) -> None:
        """Drop every ready group, as too old."""
        with self.changed:
            for number in self.schedule.ready():
                self.schedule.drop(number, STALE)
                self._stats.stale += len(self._groups.pop(number))

    def take(
        self, now: int, *, anyway: bool = False, patient: Callable[[], None] | None = None
    ) -> tuple[list[Group], RolloutStats]:
        """The groups of the step that starts after `now` updates, and the statistics since the last call.

        Args:
            anyway: whatever is ready, without waiting for more.
            patient: called, with the lock held, before every wait; what it raises ends the wait.
        """
        with self.changed:
            while (numbers := self.schedule.batch(anyway=anyway)) is None:
                if patient is not None:
                    patient()
                self.changed.wait()
            self.schedule.consume(numbers, now)
            groups = [self._groups.pop(number) for number in numbers]
            # Spares ended with this batch.
            self._groups = {number: group for number, group in self._groups.items() if self.schedule.holds(number)}
            stats, self._stats = self._stats, RolloutStats()
            self.changed.notify_all()
            return groups, stats

    def state(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Books (JSON) and files for a checkpoint: ready groups whole, of all others the numbers."""
        with self.changed:
            state: dict[str, Any] = {**self.schedule.state(), "stale": self._stats.stale}
            rows = [trajectory for number in state["ready"] for trajectory in self._groups[number]]
            return state, {PENDING: trajectories.to_bytes(rows)} if rows else {}

    def restore(self, state: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
        """The inverse of `state`."""
        rows = trajectories.from_bytes(files[PENDING]) if PENDING in files else []
        with self.changed:
            self._groups = {number: [] for number in state["ready"]}
            for row in rows:
                self._groups[row.group].append(row)
            self.schedule.restore(state, {number: oldest(group) for number, group in self._groups.items()})
            self._stats = RolloutStats(stale=state["stale"])
