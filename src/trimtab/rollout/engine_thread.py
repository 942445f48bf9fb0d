"""The thread that drives one engine: update weights, claim groups, generate, queue the responses.

What every lane shares lies in `AsyncState`, guarded by the buffer's lock. A lane looks at it only between two calls of
its engine; setting `Lane.interrupt` makes it look sooner.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from trimtab.engines.remote.shared_weights import SharedWeights
from trimtab.errors import RESUME, EngineDeadError, TrimtabError
from trimtab.rollout.buffer import Buffer
from trimtab.rollout.canary import Canary, Expected
from trimtab.rollout.collector import Collector, RolloutStats
from trimtab.rollout.schedule import Request
from trimtab.types import Completion, Engine, Prompt

InFlight = Literal["finish", "discard", "continue"]

MAX_RESTARTS = 5
"""How often in a row an engine may be lost without having finished a request."""
BACKOFF = 0.5
"""Seconds before the second attempt to bring an engine back; twice as many before each further one."""


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """Weights for every engine, and what the canary expects of one that took them."""

    version: int
    weights: SharedWeights
    expected: Expected | None = None


@dataclass(frozen=True, slots=True)
class GeneratedGroups:
    """The responses to a request, before anybody scored them."""

    request: Request
    prompts: Sequence[Prompt]
    completions: Sequence[Sequence[Completion]]
    stats: RolloutStats


@dataclass
class AsyncState:
    """Where trainer, lanes and scoring meet. Everything that changes is guarded by `buffer.changed`."""

    collector: Collector
    buffer: Buffer
    in_flight: InFlight
    chunk: int  # groups of a request, at most
    canary: Canary | None = None
    publication: WeightUpdate | None = None
    paused: bool = False
    closed: bool = False
    working: int = 0  # lanes that work
    unscored: list[GeneratedGroups] = field(default_factory=list)
    scoring: bool = False
    error: BaseException | None = None
    notes: list[str] = field(default_factory=list)

    def fail(self, error: BaseException) -> None:
        """End the run: the trainer raises `error` when it next asks for a batch."""
        with self.buffer.changed:
            self.error = self.error or error
            self.buffer.changed.notify_all()

    def note(self, line: str) -> None:
        with self.buffer.changed:
            self.notes.append(line)
            self.buffer.changed.notify_all()

    def sleep(self, seconds: float) -> None:
        """Until the time is over or the run ends."""
        with self.buffer.changed:
            self.buffer.changed.wait_for(lambda: self.closed, seconds)


class SourceClosed(Exception):
    """The run is over."""


class EngineThread:
    """See the module. `version` is that of the weights its engine holds; None: none, or unknown."""

    def __init__(self, number: int, engine: Engine, floor: AsyncState) -> None:
        self.number, self.engine, self.floor = number, engine, floor
        self.interrupt = threading.Event()
        self.version: int | None = None
        self.request: Request | None = None
        self.idle = True
        self.gone = False
        self._lost = 0
        self.thread = threading.Thread(target=self._run, name=f"engine-{number}", daemon=True)

    def _run(self) -> None:
        try:
            while True:
                self._turn()
        except SourceClosed:
            pass
        except EngineDeadError as error:
            self._give_up(error)
        except BaseException as error:
            self.floor.fail(error)

    def _turn(self) -> None:
        """One request, or one attempt at it."""
        self.request = None
        try:
            answers = self._answer(self._next())
        except EngineDeadError as lost:
            if self.request is not None:
                self.floor.buffer.repeat(self.request)
            self._recover(lost)
            return
        self._lost = 0
        with self.floor.buffer.changed:
            self.floor.unscored.append(answers)
            self.floor.buffer.changed.notify_all()

    def _next(self) -> Request:
        """The next request this lane is admitted to, with the newest weights in its engine."""
        changed, schedule = self.floor.buffer.changed, self.floor.buffer.schedule
        while True:
            with changed:
                while (publication := self._look()) is None and self.version is not None:
                    self.request = schedule.admit(self.floor.chunk, self.version)
                    if self.request is not None:
                        return self.request
                    self.idle = True
                    changed.wait()
            assert publication is not None, "lanes start after the first publication"
            self._take_over(publication)

    def _look(self) -> WeightUpdate | None:
        """With the lock held, after every pause: weights newer than those of the engine, if there are any.

        The reason for an interruption is seen here, or later at the next interruption.
        """
        while self.floor.paused and not self.floor.closed:
            if not self.idle:
                self.idle = True
                self.floor.buffer.changed.notify_all()
            self.floor.buffer.changed.wait()
        self.idle = False
        self.interrupt.clear()
        if self.floor.closed:
            raise SourceClosed
        newest = self.floor.publication
        return newest if newest is not None and newest.version != self.version else None

    def _take_over(self, publication: WeightUpdate) -> None:
        self.version = None
        self.engine.publish(publication.weights, publication.version)
        if self.floor.canary is not None and publication.expected is not None:
            self.floor.canary.check(self.engine, publication.expected)
        self.version = publication.version

    def _answer(self, request: Request) -> GeneratedGroups:
        """The responses; where the engine was interrupted it goes on, under the newest weights if these came."""
        collector, stats = self.floor.collector, RolloutStats()
        with self.floor.buffer.changed:  # tokenizers are not made for several threads
            prompts = collector.stream.at(request.first, request.count)
        begun: list[list[Completion]] | None = None
        start, decoded, prefilled = time.perf_counter(), self.engine.decoded, self.engine.prefilled
        while True:
            begun = self.engine.generate(
                prompts,
                collector.config.trainer.samples,
                collector.sampling,
                seed=collector.seed(request),
                prefixes=begun,
                interrupt=self.interrupt,
            )
            unfinished = sum(answer.finish == "abort" for group in begun for answer in group)
            if not unfinished:
                break
            with self.floor.buffer.changed:
                publication = self._look()
            if not self.floor.buffer.wanted(request):
                break
            stats.interrupted += unfinished
            if publication is not None:
                self._take_over(publication)
        stats.seconds_generating = time.perf_counter() - start
        stats.decoded, stats.prefilled = self.engine.decoded - decoded, self.engine.prefilled - prefilled
        return GeneratedGroups(request, prompts, begun, stats)

    def _recover(self, lost: EngineDeadError) -> None:
        """Bring the engine back. Raises the last `EngineDeadError` where that does not work."""
        self.version = None
        while True:
            self._lost += 1
            if self._lost > MAX_RESTARTS:
                raise lost
            if self._lost > 1:
                self.floor.sleep(BACKOFF * 2.0 ** (self._lost - 2))
            with self.floor.buffer.changed:
                if self.floor.closed:
                    raise SourceClosed
            self.floor.note(f"engine {self.number} was lost ({lost}); starting it again")
            try:
                self.engine.recover()
            except EngineDeadError as again:
                lost = again
                continue
            except TrimtabError as error:
                raise EngineDeadError(str(error)) from error
            self.floor.buffer.count(RolloutStats(restarts=1))
            return

    def _give_up(self, error: EngineDeadError) -> None:
        """The others go on without this engine; the last one takes the run with it."""
        with self.floor.buffer.changed:
            self.gone = self.idle = True
            self.floor.working -= 1
            last = self.floor.working == 0
        if last:
            self.floor.fail(TrimtabError(f"{error}; no engine is left: mend it, then {RESUME}"))
        else:
            self.floor.note(f"engine {self.number} does not come back ({error}); the others go on without it")
