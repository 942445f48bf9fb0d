"""Admission and batching of groups under a staleness bound. Pure state: no threads, no clock.

Groups are numbered in the order of the prompt stream. Each number is assigned once and is live until it ends:

    pending -> running -> ready -> consumed       in exactly one batch
      ^__________/   \\        \\
      (engine lost)   \\________\\-> dropped       counted

`no_signal` is the state of a ready group without reward variance under dynamic sampling: it is used in a batch only if
no other group is left.

The staleness bound holds by construction. A group is admitted only if it will be young enough for its batch when all
groups before it are consumed first:

    latest + (live groups before it // prompts) * updates - version of the engine <= max_lag

`latest` is the largest version at which the next batch can be taken. The number of groups before it only decreases and
updates may be skipped but not added, so the left side only decreases after the admission. There is one exception: a
batch of groups without signal advances the version and consumes no admitted groups. Those that are then too old expire.

Without `ahead`, groups are admitted only for the batch that the trainer is waiting for: generation and training take
turns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

State = Literal["pending", "running", "ready", "no_signal"]


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """Consecutive groups that one engine generates in one call."""

    first: int
    count: int

    @property
    def numbers(self) -> range:
        return range(self.first, self.first + self.count)


@dataclass(slots=True)
class GroupEntry:
    """A live group. `oldest` is the oldest policy version that sampled one of its tokens; infinite if none did."""

    state: State
    oldest: float = 0.0


@dataclass
class Schedule:
    """The states of all groups of a run."""

    prompts: int  # groups in a batch
    updates: int  # optimizer updates in a step, the largest number between two batches
    max_lag: float = math.inf  # largest age of a token when it is consumed, in updates
    ahead: bool = True  # whether groups are generated before the trainer waits for them
    max_no_signal: int | None = None  # groups without signal after which a batch uses the groups that are ready
    drawn: int = 0  # number of groups that have a number
    latest: float = math.inf  # nothing is admitted before the first call of `wait`
    waiting: bool = False
    batches_left: int | None = None
    consumed: int = 0
    dropped: int = 0
    _live: dict[int, GroupEntry] = field(default_factory=dict)  # in ascending order

    def reserve(self, count: int, version: int) -> GroupRequest:
        """Assigns the next `count` numbers and marks them as running under `version`, without checking their age."""
        request = GroupRequest(self.drawn, count)
        self.drawn += count
        self._begin(request, version)
        return request

    def admit(self, max_count: int, version: int) -> GroupRequest | None:
        """Returns groups that an engine with weights `version` may generate now: at most `max_count`, of one batch.

        Returns None if they could be too old for their batch, or if no batch of the run needs them.
        """
        pending = next(iter(self._numbers_in_state("pending")), None)
        first = self.drawn if pending is None else pending
        before = sum(number < first and entry.state != "no_signal" for number, entry in self._live.items())
        batches, offset = divmod(before, self.prompts)
        if not self._fits(batches, version):
            return None
        max_count = min(max_count, self.prompts - offset)
        if pending is None:
            return self.reserve(max_count, version)
        count = 1
        while count < max_count and self._has_state(first + count, "pending"):
            count += 1
        request = GroupRequest(first, count)
        self._begin(request, version)
        return request

    def repeat(self, request: GroupRequest) -> None:
        """Marks running groups as pending, because their engine was lost."""
        for number in request.numbers:
            if self._has_state(number, "running"):
                self._live[number] = GroupEntry("pending")

    def deliver(self, number: int, oldest: float, *, signal: bool = True) -> bool:
        """Marks a running group as generated and scored; returns False if it was dropped in the meantime."""
        if not self._has_state(number, "running"):
            return False
        self._live[number] = GroupEntry("ready" if signal else "no_signal", oldest)
        return True

    def batch(self, *, partial: bool = False) -> list[int] | None:
        """Returns the groups of the next batch, or None while it is incomplete; `partial`: the groups there are now."""
        ready: list[int] = []
        no_signal: list[int] = []
        for number, entry in self._live.items():
            if entry.state == "ready":
                ready.append(number)
            elif entry.state == "no_signal":
                no_signal.append(number)
            elif not partial:
                break
        exhausted = self.max_no_signal is not None and len(no_signal) >= self.max_no_signal
        if len(ready) >= self.prompts or partial or exhausted:
            # A batch of groups with equal rewards still has KL and entropy terms; an empty step has none.
            return ready[: self.prompts] or no_signal[: self.prompts]
        return None

    def consume(self, numbers: Iterable[int], now: int) -> None:
        """Removes the groups of the batch taken after `now` updates, and drops groups without signal."""
        for number in numbers:
            if self._live[number].state not in ("ready", "no_signal"):
                raise ValueError(f"group {number} is {self._live[number].state}: it cannot be consumed")
            if (age := now - self._live[number].oldest) > self.max_lag:
                raise ValueError(f"group {number} is {age:g} updates old, the bound is {self.max_lag:g}")
            del self._live[number]
            self.consumed += 1
        self._drop(self._numbers_in_state("no_signal"))
        self.latest, self.waiting = now + self.updates, False
        if self.batches_left is not None:
            self.batches_left -= 1

    def wait(self, now: int, batches_left: int | None = None) -> None:
        """Records that the trainer waits after `now` updates: it takes its next batch at exactly this version."""
        self.latest, self.waiting, self.batches_left = now, True, batches_left

    def expire(self) -> list[int]:
        """Drops groups that are too old for every later batch; returns their numbers."""
        stale = [
            number
            for number, entry in self._live.items()
            if self.latest - entry.oldest > self.max_lag and entry.state in ("running", "ready")
        ]
        self._drop(stale)
        return stale

    def ready(self) -> list[int]:
        return self._numbers_in_state("ready")

    def unfinished(self) -> list[int]:
        """Returns the numbers of pending and running groups."""
        return self._numbers_in_state("pending", "running")

    def contains(self, number: int) -> bool:
        """Returns whether a group is live."""
        return number in self._live

    def state(self) -> dict[str, Any]:
        """Returns the state as JSON. After `restore`, running groups are pending, and groups without signal dropped."""
        return {"drawn": self.drawn, "consumed": self.consumed, "ready": self.ready(), "unfinished": self.unfinished()}

    def restore(self, state: Mapping[str, Any], oldest: Mapping[int, float]) -> None:
        """Restores `state()`; `oldest` is the oldest version of each ready group. Numbers in no state are dropped."""
        self.drawn, self.consumed = state["drawn"], state["consumed"]
        pending = {number: GroupEntry("pending") for number in state["unfinished"]}
        ready = {number: GroupEntry("ready", oldest[number]) for number in state["ready"]}
        self._live = dict(sorted({**pending, **ready}.items()))
        self.dropped = self.drawn - self.consumed - len(self._live)

    def _begin(self, request: GroupRequest, version: int) -> None:
        for number in request.numbers:
            self._live[number] = GroupEntry("running", version)

    def _drop(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            del self._live[number]
            self.dropped += 1

    def _fits(self, batches: int, version: int) -> bool:
        """Returns whether the run needs a group with `batches` batches before it, and it will be young enough."""
        if self.batches_left is not None and batches >= self.batches_left:
            return False
        if not self.ahead and (batches or not self.waiting):
            return False
        return self.latest + batches * self.updates - version <= self.max_lag

    def _has_state(self, number: int, state: State) -> bool:
        return number in self._live and self._live[number].state == state

    def _numbers_in_state(self, *states: State) -> list[int]:
        return [number for number, entry in self._live.items() if entry.state in states]
