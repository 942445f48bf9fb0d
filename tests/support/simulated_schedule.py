"""The loop on a virtual clock: the schedule the trainer really uses, with engines, rewards and updates as delays."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from trimtab.trainer.planning.estimates import Phases
from trimtab.trainer.rollout.schedule import GroupRange, Schedule


@dataclass
class Loop:
    """One run. Times in seconds; `consumed` holds (time, age in updates) of every batch taken."""

    phases: Phases
    schedule: Schedule
    engines: int
    clock: float = 0.0
    updates: int = 0
    free_at: float = 0.0  # the rewards' queue
    busy: bool = False  # the trainer
    version: list[int] = field(default_factory=list)
    idle: list[int] = field(default_factory=list)
    consumed: list[tuple[float, float]] = field(default_factory=list)
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _count: itertools.count[int] = field(default_factory=itertools.count)

    def run(self, steps: int) -> None:
        self.version = [0] * self.engines
        self.idle = list(range(self.engines))
        self._start_work()
        while len(self.consumed) < steps:
            self.clock, _, event = heapq.heappop(self._events)
            event()
            # All events of a moment take place before any decision at that moment.
            while self._events and self._events[0][0] <= self.clock + 1e-12:
                heapq.heappop(self._events)[2]()
            self._start_work()

    def _after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.clock + seconds, next(self._count), event))

    def _start_work(self) -> None:
        """The trainer takes a batch if there is one, and every idle engine begins if it may."""
        if not self.busy:
            self.schedule.wait(self.updates)
            numbers = self.schedule.batch()
            if numbers is not None:
                age = max(self.schedule.age(number, self.updates) for number in numbers)
                self.schedule.consume(numbers, self.updates)
                self.consumed.append((self.clock, age))
                self.busy = True
                self._after(self.phases.trainer, self._published)
        chunk = -(-self.schedule.prompts // self.engines)
        for engine in list(self.idle):
            request = self.schedule.admit(chunk, self.updates)
            if request is not None:
                self.idle.remove(engine)
                share = request.count / chunk
                self._after(self.phases.engines * share, self._written(engine, request, self.updates))

    def _written(self, engine: int, request: GroupRange, version: int) -> Callable[[], None]:
        def event() -> None:
            self.idle.append(engine)
            self.free_at = max(self.clock, self.free_at) + self.phases.score * request.count / self.schedule.prompts
            self._after(self.free_at - self.clock, lambda: self._scored(request, version))

        return event

    def _scored(self, request: GroupRange, version: int) -> None:
        for number in request.numbers:
            self.schedule.deliver(number, version)

    def _published(self) -> None:
        self.updates += self.schedule.updates
        self.busy = False


def simulate(
    phases: Phases, ahead: int, *, updates: int = 1, engines: int = 1, steps: int = 150
) -> tuple[float, float, float]:
    """Seconds of a step, mean and largest age of a batch in updates, over the second half of `steps`."""
    loop = Loop(phases, Schedule(prompts=4, updates=updates, max_lag=ahead * updates), engines)
    loop.run(steps)
    settled = loop.consumed[steps // 2 :]
    ages = [age for _, age in settled]
    return (settled[-1][0] - settled[0][0]) / (len(settled) - 1), sum(ages) / len(ages), max(ages)
