"""The thread that drives one engine: update weights, admit a request, generate, queue the responses.

All threads share `AsyncState`, guarded by the buffer's lock. An engine thread reads it only between two calls of its
engine; setting `EngineThread.interrupt` aborts the current call.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any, Literal

from trimtab.errors import RESUME, EngineDeadError, TrimtabError
from trimtab.trainer.engines.request import Prefixes
from trimtab.trainer.engines.weight_transfer import SharedWeights
from trimtab.trainer.rollout.buffer import Buffer
from trimtab.trainer.rollout.canary import Canary, CanaryPrediction
from trimtab.trainer.rollout.collector import Collector
from trimtab.trainer.rollout.responses import GeneratedGroups
from trimtab.trainer.rollout.rollout_stats import RolloutStats
from trimtab.trainer.rollout.schedule import GroupRange
from trimtab.trainer.rollout.source import publish
from trimtab.types import Completion, Engine

MAX_RESTARTS = 5  # restarts of an engine without a finished request in between, before the thread gives up
RESTART_BACKOFF = 0.5  # seconds before the second restart in a row; doubles with each further one


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """Weights for every engine, and the log-probs that the canary expects under them."""

    version: int
    weights: SharedWeights
    expected: CanaryPrediction | None = None


@dataclass
class AsyncState:
    """The state that trainer, engine threads and scoring share, guarded by `buffer.changed`."""

    collector: Collector
    buffer: Buffer
    in_flight: Literal["finish", "continue"]
    chunk: int  # largest number of groups in a request
    canary: Canary | None = None
    update: WeightUpdate | None = None
    paused: bool = False
    closed: bool = False
    working: int = 0  # engine threads that are running
    unscored: list[GeneratedGroups] = field(default_factory=list)
    scoring: bool = False
    error: BaseException | None = None
    notes: list[str] = field(default_factory=list)

    def fail(self, error: BaseException) -> None:
        """Ends the run: the trainer's next call for a batch raises `error`."""
        with self.buffer.changed:
            self.error = self.error or error
            self.buffer.changed.notify_all()

    def note(self, line: str) -> None:
        """Queues a message for the user."""
        with self.buffer.changed:
            self.notes.append(line)
            self.buffer.changed.notify_all()

    def sleep(self, seconds: float) -> None:
        """Waits for `seconds` or until the run ends."""
        with self.buffer.changed:
            self.buffer.changed.wait_for(lambda: self.closed, seconds)


class SourceClosed(Exception):
    """The rollout source was closed."""


class EngineThread:
    """The thread of one engine."""

    def __init__(self, number: int, engine: Engine, state: AsyncState) -> None:
        self.number, self.engine, self.state = number, engine, state
        self.interrupt = threading.Event()
        self.version: int | None = None  # of the engine's weights; None: unknown
        self.request: GroupRange | None = None
        self.idle = True
        self.dropped = False  # the request in progress is not needed: the run went back to an earlier state
        self.is_lost = False
        self._losses = 0
        self.thread = threading.Thread(target=self._run, name=f"engine-{number}", daemon=True)

    def _run(self) -> None:
        try:
            while True:
                self._run_once()
        except SourceClosed:
            pass
        except EngineDeadError as error:
            self._give_up(error)
        except BaseException as error:
            self.state.fail(error)

    def _run_once(self) -> None:
        """Generates one request; if the engine is lost, requeues the request and restarts the engine."""
        self.request = None
        try:
            generated = self._generate(self._next())
        except EngineDeadError as lost:
            if self.request is not None and not self.dropped:
                self.state.buffer.repeat(self.request)
            self.restart(lost)
            return
        self._losses = 0
        if self.dropped:
            return
        with self.state.buffer.changed:
            self.state.unscored.append(generated)
            self.state.buffer.changed.notify_all()

    def _next(self) -> GroupRange:
        """Waits for a request that may be generated under the engine's weights; loads newer weights first."""
        changed, schedule = self.state.buffer.changed, self.state.buffer.schedule
        while True:
            with changed:
                while (update := self._wait_if_paused()) is None and self.version is not None:
                    self.request = schedule.admit(self.state.chunk, self.version)
                    if self.request is not None:
                        self.dropped = False
                        return self.request
                    self.idle = True
                    changed.wait()
            assert update is not None, "threads start after the first weight update"
            self._update_weights(update)

    def _wait_if_paused(self) -> WeightUpdate | None:
        """Waits while paused, then returns weights that are newer than the engine's, if there are any.

        Call it with the lock held. It clears `interrupt`: its cause is visible in the state by now, or sets it again.
        """
        while self.state.paused and not self.state.closed:
            if not self.idle:
                self.idle = True
                self.state.buffer.changed.notify_all()
            self.state.buffer.changed.wait()
        self.idle = False
        self.interrupt.clear()
        if self.state.closed:
            raise SourceClosed
        newest = self.state.update
        return newest if newest is not None and newest.version != self.version else None

    def _update_weights(self, update: WeightUpdate) -> None:
        self.version = None
        stats = publish(self.engine, update.weights, update.version, self.state.canary, update.expected)
        self.state.buffer.count(stats)
        self.version = update.version

    def _generate(self, request: GroupRange) -> GeneratedGroups:
        """Generates the responses; after an abort continues them, under newer weights if there are any."""
        engine, stats, start = self.engine, RolloutStats(), time.perf_counter()

        def generate(*arguments: Any, prefixes: Prefixes | None = None, **options: Any) -> list[list[Completion]]:
            while True:
                decoded, prefilled = engine.decoded_tokens, engine.prefilled_tokens
                completions = engine.generate(*arguments, prefixes=prefixes, abort=self.interrupt, **options)
                # Tokens of this call alone: after a weight update, the canary samples with the same engine.
                stats.decoded += engine.decoded_tokens - decoded
                stats.prefilled += engine.prefilled_tokens - prefilled
                unfinished = sum(completion.finish_reason == "abort" for group in completions for completion in group)
                if not unfinished or not self._resume(request):
                    return completions
                stats.interrupted += unfinished
                prefixes = completions

        generated = self.state.collector.responses.respond(request, generate)
        stats.seconds_generating = time.perf_counter() - start
        generated.stats.add(stats)
        return generated

    def _resume(self, request: GroupRange) -> bool:
        """Loads newer weights, if there are any; returns False if the request was dropped meanwhile."""
        with self.state.buffer.changed:
            update = self._wait_if_paused()
        if self.dropped or not self.state.buffer.is_live(request):
            return False
        if update is not None:
            self._update_weights(update)
        return True

    def restart(self, lost: EngineDeadError) -> None:
        """Restarts the engine, which was `lost`. Raises the last `EngineDeadError` after `MAX_RESTARTS` attempts."""
        self.version = None
        while True:
            self._losses += 1
            if self._losses > MAX_RESTARTS:
                raise lost
            if self._losses > 1:
                self.state.sleep(RESTART_BACKOFF * 2.0 ** (self._losses - 2))
            with self.state.buffer.changed:
                if self.state.closed:
                    raise SourceClosed
            self.state.note(f"engine {self.number} was lost ({lost}); starting it again")
            try:
                self.engine.restart()
            except EngineDeadError as error:
                lost = error
                continue
            except TrimtabError as error:
                raise EngineDeadError(str(error)) from error
            self.state.buffer.count(RolloutStats(restarts=1))
            return

    def _give_up(self, error: EngineDeadError) -> None:
        """Ends this thread; if no other engine is left, the run fails."""
        with self.state.buffer.changed:
            self.is_lost = self.idle = True
            self.state.working -= 1
            if self.state.working == 0:  # with the lock held: a thread that sees 0 also sees the error
                self.state.fail(TrimtabError(f"{error}; no engine is left: mend it, then {RESUME}"))
            else:
                self.state.note(f"engine {self.number} does not come back ({error}); the others go on without it")
