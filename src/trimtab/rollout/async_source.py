"""Asynchronous rollouts: one thread per engine, one scoring thread, one buffer, staleness bounded per token.

lanes (one per engine) --responses--> scoring --groups--> buffer --batches--> trainer
  ^________________________________ publications ____________________________/
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any

from torch import Tensor

from trimtab.engines.remote.shared_weights import SharedWeights, share
from trimtab.errors import EngineDeadError
from trimtab.rollout.buffer import Buffer
from trimtab.rollout.canary import Canary, Expected
from trimtab.rollout.collector import Collector, Group, RolloutStats
from trimtab.rollout.engine_thread import MAX_RESTARTS, AsyncState, EngineThread, GeneratedGroups, WeightUpdate
from trimtab.rollout.source import FeedState, Found, Weights
from trimtab.types import Engine

PATIENCE = 5.0
"""Seconds a thread has to end before its engine is closed under it."""


class AsyncSource:
    """See the module and `feed.RolloutSource`. With `max_lag` 0 or None the same lanes work in step: one batch at a
    time.

    `notify` receives lines for people, in the trainer's thread.
    """

    def __init__(
        self,
        collector: Collector,
        buffer: Buffer,
        engines: Sequence[Engine],
        notify: Callable[[str], None],
        canary: Canary | None = None,
    ) -> None:
        trainer = collector.config.trainer
        self.collector = collector
        self._floor = AsyncState(
            collector, buffer, trainer.in_flight, chunk=-(-trainer.prompts // len(engines)), canary=canary
        )
        for engine in engines:
            if hasattr(engine, "notify"):  # that of servers waits for them in a lane, which only leaves notes
                engine.notify = self._floor.note  # pyright: ignore[reportAttributeAccessIssue]
        self._lanes = [EngineThread(number, engine, self._floor) for number, engine in enumerate(engines)]
        self._scoring = Scoring(self._floor)
        self._notify = notify
        self._started = False

    @property
    def published(self) -> int:
        return -1 if self._floor.publication is None else self._floor.publication.version

    def take(self, now: int, left: int) -> tuple[list[Group], RolloutStats]:
        self._start()
        start, floor = time.perf_counter(), self._floor
        with floor.buffer.changed:
            self._look()  # no wait may follow: the other engines can keep every batch ready
            floor.buffer.schedule.wait(now, left)
            floor.buffer.changed.notify_all()  # what the trainer waits for may be admitted now
            self._drop_late()
            groups, stats = floor.buffer.take(now, patient=self._look)
            self._drop_late()
        stats.seconds_waiting = time.perf_counter() - start
        self._tell()
        return groups, stats

    def publish(self, weights: Weights, version: int, expected: Expected | None = None) -> None:
        """Hold a copy, so that training can go on; each lane takes it over at its next boundary."""
        publication, floor = WeightUpdate(version, share(weights), expected), self._floor
        with floor.buffer.changed:
            floor.publication = publication
            if floor.in_flight == "continue":
                self._interrupt()
            floor.buffer.changed.notify_all()

    def look(self, weights: Weights, version: int, through: Callable[[Engine], Found], *, rounded: bool) -> Found:
        """Lanes rest meanwhile; what they are generating is finished first, or interrupted where it may be."""
        with self._paused(), ExitStack() as own:
            lane = next(lane for lane in self._lanes if not lane.gone)
            held = None
            for life in range(MAX_RESTARTS):
                try:
                    if rounded or lane.version != version or lane.engine.policy_version != version:
                        held = held or own.enter_context(closing(share(weights)))
                        lane.version = None
                        lane.engine.publish(held, version, exact=True)
                    return through(lane.engine)
                except EngineDeadError as lost:
                    self._notify(f"engine {lane.number} was lost ({lost}); starting it again")
                    self._floor.sleep(life / 2)
                    lane.version = None
                    with suppress(EngineDeadError):  # the next attempt says so
                        lane.engine.recover()
                        self._floor.buffer.count(RolloutStats(restarts=1))
            raise EngineDeadError(f"engine {lane.number} was lost {MAX_RESTARTS} times in a row: look at what ends it")

    def state(self, updates: int) -> FeedState:
        """Published weights are part of it only while they lag behind the trainer's."""
        meta, files = self._floor.buffer.state()
        meta["published"] = self.published
        publication = self._floor.publication
        if publication is None or publication.version == updates:
            return {}, meta, files
        return {"engine": _once(publication.weights)}, meta, files

    def restore(self, tensors: Mapping[str, Mapping[str, Tensor]], meta: Any, files: Mapping[str, bytes]) -> None:
        self._floor.buffer.restore(meta, files)
        if "engine" in tensors:
            self.publish(tensors["engine"].items(), meta["published"])

    def close(self) -> None:
        floor = self._floor
        with floor.buffer.changed:
            floor.closed = True
            self._interrupt()
            floor.buffer.changed.notify_all()
        threads = [*(lane.thread for lane in self._lanes), self._scoring.thread] if self._started else []
        end = time.monotonic() + PATIENCE
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        for lane in self._lanes:
            lane.engine.close()

    def _start(self) -> None:
        if not self._started:
            self._started = True
            self._floor.working = len(self._lanes)
            for thread in (*(lane.thread for lane in self._lanes), self._scoring.thread):
                thread.start()

    def _interrupt(self) -> None:
        for lane in self._lanes:
            lane.interrupt.set()

    def _drop_late(self) -> None:
        """In order nothing is late, unless a batch of groups without signal came in between, which moves the clock but
        uses up nothing of what was generated ahead. What is too old for the next batch is not written to its end."""
        floor = self._floor
        if floor.in_flight != "discard" and not self.collector.config.trainer.dynamic_sampling:
            return
        floor.buffer.expire()
        for lane in self._lanes:
            if lane.request is not None and not floor.buffer.wanted(lane.request):
                lane.interrupt.set()

    def _look(self) -> None:
        """What the trainer does before it waits: end with the run's error, and tell what happened."""
        if self._floor.error is not None:
            raise self._floor.error
        self._tell()

    def _tell(self) -> None:
        with self._floor.buffer.changed:
            notes, self._floor.notes = self._floor.notes, []
        for line in notes:
            self._notify(line)

    @contextmanager
    def _paused(self) -> Iterator[None]:
        floor = self._floor
        with floor.buffer.changed:
            floor.paused = True
            if floor.in_flight == "continue":
                self._interrupt()
            floor.buffer.changed.notify_all()
            self._look()
            while not self._at_rest():
                floor.buffer.changed.wait()
                self._look()
        try:
            yield
        finally:
            with floor.buffer.changed:
                floor.paused = False
                floor.buffer.changed.notify_all()

    def _at_rest(self) -> bool:
        floor = self._floor
        return all(lane.idle for lane in self._lanes) and not floor.unscored and not floor.scoring


def _once(weights: SharedWeights) -> dict[str, Tensor]:
    """Weights by name, those that are tied under their first name only."""
    first: dict[int, str] = {}
    return {name: tensor for name, tensor in weights if first.setdefault(tensor.data_ptr(), name) == name}


class Scoring:
    """Scores requests one after another, the oldest groups first, and puts what can be used into the buffer."""

    def __init__(self, floor: AsyncState) -> None:
        self.floor = floor
        self.thread = threading.Thread(target=self._run, name="scoring", daemon=True)

    def _run(self) -> None:
        try:
            while (answers := self._next()) is not None:
                self._score(answers)
        except BaseException as error:
            self.floor.fail(error)

    def _next(self) -> GeneratedGroups | None:
        floor = self.floor
        with floor.buffer.changed:
            floor.scoring = False
            floor.buffer.changed.notify_all()
            floor.buffer.changed.wait_for(lambda: floor.closed or floor.unscored)
            if floor.closed:
                return None
            first = min(floor.unscored, key=lambda answers: answers.request.first)
            floor.unscored.remove(first)
            floor.scoring = True
            return first

    def _score(self, answers: GeneratedGroups) -> None:
        buffer, stats = self.floor.buffer, answers.stats
        if buffer.wanted(answers.request):
            groups = self.floor.collector.grade(answers.request, answers.prompts, answers.completions, stats)
            buffer.deliver(answers.request, groups, stats)
            return
        # Too old for every batch to come: its score is not needed, but its lengths show what discarding favors.
        lengths = [len(answer.response_ids) for group in answers.completions for answer in group]
        stats.add(RolloutStats(generated=len(lengths), response_tokens=sum(lengths), discarded_lengths=lengths))
        buffer.count(stats)
