"""Admission and batching of groups under a staleness bound. Pure state: no threads, no clock.

Groups are numbered in the order of the prompt stream. A number is handed out once and is live until it ends:

    owed -> running -> ready -> consumed          by exactly one batch
      ^________/   \\        \\
      (engine lost)  \\________\\-> dropped         with a reason, counted

`spare` is a ready group without signal under dynamic sampling: it has a place in a batch only if nothing else is left.

The staleness bound holds by construction. A group is admitted only if it would be young enough in the batch it falls
into when everything before it is consumed first:

    latest + (live groups before it // prompts) * updates - version of the engine <= max_lag

`latest` is the version at which the next batch is taken at the latest. Groups before it only ever become fewer and
updates are only ever skipped, so the left side can only fall once the group is admitted. One case breaks this: a
batch of spares moves the clock without using up a group, and whatever is then too old must expire.

Without a lag (`max_lag` 0 or None) groups are admitted only for the batch the trainer is waiting for: generation and
training take turns.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

State = Literal["owed", "running", "ready", "spare"]

STALE, NO_SIGNAL = "stale", "no_signal"


@dataclass(frozen=True, slots=True)
class Request:
    """Consecutive groups that one engine generates in one call."""

    first: int
    count: int

    @property
    def numbers(self) -> range:
        return range(self.first, self.first + self.count)


@dataclass(slots=True)
class Entry:
    """A live group; `oldest` is the oldest version that wrote, or writes, in it (infinite: none did)."""

    state: State
    oldest: float = 0.0


@dataclass
class Schedule:
    """The books of one run.

    Args:
        prompts: groups of a batch.
        updates: optimizer updates of a step, the most that pass between two batches.
        max_lag: largest age of a token when it is consumed, in updates; None: any, but generated in step.
        in_order: a batch is the next `prompts` groups. Otherwise it is the first `prompts` ones that are ready.
        patience: groups without signal one batch may cost; after that it is made of what there is. None: any number.
    """

    prompts: int
    updates: int
    max_lag: int | None = None
    in_order: bool = True
    patience: int | None = None
    drawn: int = 0
    latest: float = math.inf  # nothing is admitted before the trainer has said where it stands
    waiting: bool = False
    batches_left: int | None = None
    consumed: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    _live: dict[int, Entry] = field(default_factory=dict)

    def reserve(self, count: int, version: int) -> Request:
        """The next `count` numbers, running from now on under `version`, whatever their age will be."""
        request = Request(self.drawn, count)
        self.drawn += count
        self._begin(request, version)
        return request

    def admit(self, most: int, version: int) -> Request | None:
        """What an engine that holds `version` may generate now: at most `most` groups of one batch, the oldest first.

        None: whatever it generated could be too old when its turn comes, or no batch of the run needs it.
        """
        owed = next((number for number, entry in self._sorted() if entry.state == "owed"), None)
        first = self.drawn if owed is None else owed
        batches, place = divmod(self._before(first), self.prompts)
        if not self._fits(batches, version):
            return None
        most = min(most, self.prompts - place)
        if owed is None:
            return self.reserve(most, version)
        count = 1
        while count < most and self._is(first + count, "owed"):
            count += 1
        request = Request(first, count)
        self._begin(request, version)
        return request

    def repeat(self, request: Request) -> None:
        """The engine that generated these was lost: they must be generated again."""
        for number in request.numbers:
            if self._is(number, "running"):
                self._live[number] = Entry("owed")

    def deliver(self, number: int, oldest: float, *, signal: bool = True) -> bool:
        """A running group is generated and scored. False if it was dropped in the meantime."""
        if not self._is(number, "running"):
            return False
        self._live[number] = Entry("ready" if signal else "spare", oldest)
        return True

    def batch(self, *, anyway: bool = False) -> list[int] | None:
        """The groups the next batch is made of; None while it is not complete. `anyway`: of what there is now."""
        ready: list[int] = []
        spare: list[int] = []
        for number, entry in self._sorted():
            if entry.state == "ready":
                ready.append(number)
            elif entry.state == "spare":
                spare.append(number)
            elif self.in_order and not anyway:
                break
        tired = self.patience is not None and len(spare) >= self.patience
        if len(ready) >= self.prompts or anyway or tired:
            # A batch of nothing but equal rewards still carries KL and entropy: better than an empty step.
            return ready[: self.prompts] or spare[: self.prompts]
        return None

    def consume(self, numbers: Iterable[int], now: int) -> None:
        """These groups are trained on by the step that starts now, after `now` updates. Spares have had their turn."""
        for number in numbers:
            if self._live[number].state not in ("ready", "spare"):
                raise ValueError(f"group {number} is {self._live[number].state}: it cannot be consumed")
            if self.age(number, now) > (self.max_lag if self.max_lag is not None else float("inf")):
                raise ValueError(
                    f"group {number} is {self.age(number, now):g} updates old, the bound is {self.max_lag}"
                )
            del self._live[number]
            self.consumed += 1
        for number in self._those("spare"):
            self.drop(number, NO_SIGNAL)
        self.latest, self.waiting = now + self.updates, False
        if self.batches_left is not None:
            self.batches_left -= 1

    def wait(self, now: int, batches_left: int | None = None) -> None:
        """The trainer stands still after `now` updates: it takes its next batch at this version and at no later one."""
        self.latest, self.waiting, self.batches_left = now, True, batches_left

    def expire(self) -> list[int]:
        """Drop what is too old for every batch to come, and return it."""
        if self.max_lag is None:
            return []
        late = [number for number, entry in self._sorted() if self.latest - entry.oldest > self.max_lag]
        late = [number for number in late if self._live[number].state in ("running", "ready")]
        for number in late:
            self.drop(number, STALE)
        return late

    def drop(self, number: int, reason: str) -> None:
        del self._live[number]
        self.dropped[reason] += 1

    def age(self, number: int, now: int) -> float:
        """Updates since the oldest token of a live group was written."""
        return now - self._live[number].oldest

    def ready(self) -> list[int]:
        return self._those("ready")

    def unfinished(self) -> list[int]:
        """Numbers that were handed out and are neither ready nor at their end."""
        return sorted(self._those("owed") + self._those("running"))

    def holds(self, number: int) -> bool:
        """Whether a number is live."""
        return number in self._live

    @property
    def live(self) -> int:
        return len(self._live)

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold, as JSON. Running groups will be generated again; spares will not."""
        dropped = self.dropped + Counter({NO_SIGNAL: len(self._those("spare"))})
        return {
            "drawn": self.drawn,
            "consumed": self.consumed,
            "dropped": dict(dropped),
            "ready": self.ready(),
            "unfinished": self.unfinished(),
        }

    def restore(self, state: Mapping[str, Any], oldest: Mapping[int, float]) -> None:
        """The inverse of `state`; `oldest` gives, for each ready group, the oldest version that wrote in it."""
        self.drawn, self.consumed, self.dropped = state["drawn"], state["consumed"], Counter(state["dropped"])
        self._live = {number: Entry("owed") for number in state["unfinished"]}
        self._live |= {number: Entry("ready", oldest[number]) for number in state["ready"]}

    def _begin(self, request: Request, version: int) -> None:
        for number in request.numbers:
            self._live[number] = Entry("running", version)

    def _before(self, first: int) -> int:
        return sum(number < first and entry.state != "spare" for number, entry in self._live.items())

    def _fits(self, batches: int, version: int) -> bool:
        if self.batches_left is not None and batches >= self.batches_left:
            return False
        if not self.max_lag and (batches or not self.waiting):
            return False
        return self.max_lag is None or self.latest + batches * self.updates - version <= self.max_lag

    def _is(self, number: int, state: State) -> bool:
        return number in self._live and self._live[number].state == state

    def _those(self, state: State) -> list[int]:
        return [number for number, entry in self._sorted() if entry.state == state]

    def _sorted(self) -> Iterator[tuple[int, Entry]]:
        return iter(sorted(self._live.items()))
