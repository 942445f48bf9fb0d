"""The schedule under random orders of everything that may happen: the bound holds, nothing is lost or used twice."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.trainer.rollout.schedule import GroupRequest, Schedule

STEPS = 8
EXAMPLES = max(30, settings().max_examples)


@dataclass
class EngineThread:
    version: int = -1
    request: GroupRequest | None = None


@dataclass
class World:
    """A trainer, engines and a clock of optimizer updates, all of them played by `chance`."""

    chance: Random
    prompts: int
    updates: int
    lag: int
    lanes: int
    sync_every: int = 1
    signal: float = 1.0  # probability that a group has some
    refill: int | None = None
    now: int = 0
    step: int = 0
    published: int = 0
    batches: list[list[int]] = field(default_factory=list)
    saved: str = ""
    events: int = 0
    unscored: list[tuple[GroupRequest, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.schedule = self._empty()
        self.crew = [EngineThread() for _ in range(self.lanes)]
        self.oldest: dict[int, int] = {}  # ready groups, as the buffer holds them
        self.waiting = False
        self._save()

    def _empty(self) -> Schedule:
        patience = self.prompts * self.refill if self.refill else None
        return Schedule(self.prompts, self.updates, self.lag, self.lag > 0, max_no_signal=patience)

    def live(self) -> None:
        """To the last step, killed now and then while there are kills left."""
        kills = 2
        while self.step < STEPS:
            self.events += 1
            assert self.events < 20_000, "no progress"
            moves = [self._trainer, self._score, *(lambda lane=lane: self._lane(lane) for lane in self.crew)]
            self.chance.choice(moves)()
            if kills and self.chance.random() < 0.01:
                kills -= 1
                self._kill()
            self._balance()

    def _trainer(self) -> None:
        if not self.waiting:
            self.waiting = True
            self.schedule.wait(self.now, STEPS - self.step)
            self._expire()
        numbers = self.schedule.batch()
        if numbers is None:
            return
        for number in numbers:
            assert self.now - self.oldest[number] <= self.lag
            assert all(number not in batch for batch in self.batches)
        self.schedule.consume(numbers, self.now)
        self.batches.append(numbers)
        self.waiting = False
        self._expire()
        self.step += 1
        self.now += self.chance.randint(0, self.updates)  # an update may be skipped
        if self.now - self.published >= self.sync_every:
            self.published = self.now
        if self.chance.random() < 0.5:
            self._save()

    def _expire(self) -> None:
        if self.refill is not None:
            self.schedule.expire()

    def _lane(self, lane: EngineThread) -> None:
        if lane.request is None:
            lane.version = self.published
            lane.request = self.schedule.admit(-(-self.prompts // self.lanes), lane.version)
            return
        if self.chance.random() < 0.3:
            return  # a slow one
        if self.chance.random() < 0.1:
            self.schedule.repeat(lane.request)
        else:
            self.unscored.append((lane.request, lane.version))
        lane.request = None

    def _score(self) -> None:
        """Rewards may be slower than engines, so that many requests wait for theirs."""
        if not self.unscored or self.chance.random() < 0.5:
            return
        request, version = self.unscored.pop(0)
        for number in request.numbers:
            signal = self.chance.random() < self.signal
            if self.schedule.deliver(number, version, signal=signal or self.refill is None):
                self.oldest[number] = version

    def _save(self) -> None:
        counters = [self.now, self.step, self.published, self.batches, self.oldest]
        self.saved = json.dumps([self.schedule.state(), counters])

    def _kill(self) -> None:
        state, (self.now, self.step, self.published, self.batches, oldest) = json.loads(self.saved)
        self.oldest = {int(number): version for number, version in oldest.items()}
        self.schedule = self._empty()
        self.schedule.restore(state, {number: self.oldest[number] for number in state["ready"]})
        self.crew = [EngineThread() for _ in range(self.lanes)]
        self.unscored = []
        self.waiting = False

    def _balance(self) -> None:
        """Every number is consumed, dropped, or live."""
        books = self.schedule
        assert books.consumed == sum(len(batch) for batch in self.batches)
        assert books.drawn == books.consumed + books.dropped + len(books._live)


SIZES = {
    "chance": st.integers(0, 2**32).map(Random),
    "prompts": st.integers(1, 7),
    "updates": st.integers(1, 4),
    "spare": st.integers(0, 9),
    "lanes": st.integers(1, 4),
}


@given(**SIZES, sync_every=st.integers(1, 6))
@settings(max_examples=EXAMPLES)
def test_in_order_every_batch_is_the_next_groups_and_young_enough(
    chance: Random, prompts: int, updates: int, spare: int, lanes: int, sync_every: int
) -> None:
    lag = max(updates, sync_every - 1) + spare
    world = World(chance, prompts, updates, lag, lanes, sync_every)
    world.live()
    assert world.batches == [list(range(i * prompts, (i + 1) * prompts)) for i in range(STEPS)]
    assert not world.schedule.dropped
    assert world.schedule.drawn == STEPS * prompts  # nothing is generated for batches after the last


@given(**SIZES, signal=st.floats(0.0, 1.0))
@settings(max_examples=EXAMPLES)
def test_groups_without_signal_are_replaced_within_bounds(
    chance: Random, prompts: int, updates: int, spare: int, lanes: int, signal: float
) -> None:
    world = World(chance, prompts, updates, updates + spare, lanes, signal=signal, refill=3)
    world.live()
    assert all(1 <= len(batch) <= prompts for batch in world.batches)


@given(**{name: SIZES[name] for name in ("chance", "prompts", "updates", "lanes")})
@settings(max_examples=EXAMPLES)
def test_without_a_lag_generation_and_training_take_turns(
    chance: Random, prompts: int, updates: int, lanes: int
) -> None:
    world = World(chance, prompts, updates, 0, lanes)
    world.live()
    assert world.batches == [list(range(i * prompts, (i + 1) * prompts)) for i in range(STEPS)]


def test_admission_by_hand() -> None:
    """4 prompts, 2 updates a step, lag 4: beside the batch in progress, exactly two more may be generated."""
    books = Schedule(prompts=4, updates=2, max_lag=4)
    books.wait(10)
    assert books.admit(3, version=10) == GroupRequest(0, 3)
    assert books.admit(3, version=10) == GroupRequest(3, 1)  # a request never spans two batches
    for number in range(4):
        books.deliver(number, 10)
    books.consume([0, 1, 2, 3], 10)  # the next batch is taken after 12 updates
    assert books.admit(4, version=10) == GroupRequest(4, 4)  # age 2
    assert books.admit(4, version=10) == GroupRequest(8, 4)  # age 4
    assert books.admit(4, version=10) is None  # age 6
    assert books.admit(4, version=12) == GroupRequest(12, 4)


def test_lost_requests_come_first_and_in_order() -> None:
    books = Schedule(prompts=4, updates=1, max_lag=9)
    books.wait(0)
    first, second = books.admit(4, 0), books.admit(4, 0)
    books.deliver(1, 0)
    books.repeat(second)
    books.repeat(first)
    assert books.unfinished() == [0, 2, 3, 4, 5, 6, 7]
    assert books.admit(4, 0) == GroupRequest(0, 1)  # group 1 is ready
    assert books.admit(4, 0) == GroupRequest(2, 2)
    assert books.admit(4, 0) == GroupRequest(4, 4)


def test_a_group_that_is_too_old_or_not_ready_is_never_consumed() -> None:
    books = Schedule(prompts=1, updates=1, max_lag=2)
    books.reserve(2, 5)
    with pytest.raises(ValueError, match="group 0 is running"):
        books.consume([0], 5)
    books.deliver(0, 5)
    with pytest.raises(ValueError, match="3 updates old, the bound is 2"):
        books.consume([0], 8)


def test_a_planted_fault_is_found() -> None:
    """A schedule that admits groups that may be too old breaks the bound somewhere: the properties above can fail."""

    class Loose(Schedule):
        def _fits(self, batches: int, version: int) -> bool:
            return super()._fits(max(0, batches - 1), version)  # a batch too many

    class Careless(World):
        def _empty(self) -> Schedule:
            return Loose(self.prompts, self.updates, self.lag)

    worlds = [Careless(Random(seed), prompts=2, updates=1, lag=1, lanes=3) for seed in range(100)]
    with pytest.raises((AssertionError, ValueError)):
        [world.live() for world in worlds]
