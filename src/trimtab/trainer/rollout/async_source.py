"""Asynchronous rollouts: one thread per engine, one scoring thread, one buffer, staleness bounded per token.

engine threads --responses--> scoring --groups--> buffer --batches--> trainer
     ^_________________________ weight updates ________________________/

All threads share the attributes of `AsyncSource`, guarded by the buffer's lock. An engine thread reads them only
between two calls of its engine; setting `EngineThread.interrupt` aborts the current call.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from queue import PriorityQueue
from typing import Any

from torch import Tensor

from trimtab.errors import RESUME, EngineDeadError, TrimtabError
from trimtab.trainer.engines.request import Prefixes
from trimtab.trainer.engines.weight_transfer import SharedWeights, share, with_first_names
from trimtab.trainer.rollout.buffer import Buffer
from trimtab.trainer.rollout.canary import Canary, CanaryPrediction
from trimtab.trainer.rollout.collector import Collector, Group
from trimtab.trainer.rollout.responses import GeneratedGroups
from trimtab.trainer.rollout.rollout_stats import RolloutStats
from trimtab.trainer.rollout.schedule import GroupRequest
from trimtab.trainer.rollout.source import BufferedSource, Result, Weights, publish
from trimtab.types import Completion, Engine

MAX_RESTARTS = 5  # restarts of an engine without a finished request in between, before the thread gives up
RESTART_BACKOFF = 0.5  # seconds before the second restart in a row; doubles with each further one
SHUTDOWN_TIMEOUT = 5.0  # seconds to wait for threads to end before their engines are closed


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """Weights for every engine, and the log-probs that the canary expects under them."""

    version: int
    weights: SharedWeights
    expected: CanaryPrediction | None = None


class AsyncSource(BufferedSource):
    """A `RolloutSource` whose engines generate while the trainer updates.

    With a `max_lag` of 0 or None the same threads generate one batch at a time, while the trainer waits. `notify`
    receives messages for the user, in the trainer's thread.
    """

    def __init__(
        self,
        collector: Collector,
        buffer: Buffer,
        engines: Sequence[Engine],
        notify: Callable[[str], None],
        canary: Canary | None = None,
    ) -> None:
        super().__init__(collector, buffer)
        self.canary = canary
        self.chunk = -(-collector.config.trainer.prompts // len(engines))  # largest number of groups in a request
        self.update: WeightUpdate | None = None
        self.paused = self.closed = False
        # Responses to score, those of the oldest request first; None ends the thread.
        self.unscored: PriorityQueue[tuple[float, GeneratedGroups | None]] = PriorityQueue()
        self._error: BaseException | None = None
        self._notes: list[str] = []
        for engine in engines:
            if hasattr(engine, "notify"):  # called in the engine's thread, where messages are queued
                engine.notify = self.note  # pyright: ignore[reportAttributeAccessIssue]
        self._threads = [EngineThread(number, engine, self) for number, engine in enumerate(engines)]
        self._scoring = threading.Thread(target=self._score_all, name="scoring", daemon=True)
        self._notify = notify
        self._started = False

    @property
    def published(self) -> int:
        return -1 if self.update is None else self.update.version

    @property
    def all_lost(self) -> bool:
        """Whether no engine is left."""
        return all(thread.is_lost for thread in self._threads)

    def fail(self, error: BaseException) -> None:
        """Ends the run: the trainer's next call for a batch raises `error`."""
        with self.buffer.changing():
            self._error = self._error or error

    def note(self, line: str) -> None:
        """Queues a message for the user."""
        with self.buffer.changing():
            self._notes.append(line)

    def sleep(self, seconds: float) -> None:
        """Waits for `seconds` or until the source is closed."""
        with self.buffer.changed:
            self.buffer.changed.wait_for(lambda: self.closed, seconds)

    def take(self, version: int, batches_left: int) -> tuple[list[Group], RolloutStats]:
        start = time.perf_counter()
        if not self._started:
            self._started = True
            for thread in (*(thread.thread for thread in self._threads), self._scoring):
                thread.start()
        with self.buffer.changed:
            self._raise_error()  # if the batch is ready, the call below does not wait and so raises nothing
            self.buffer.schedule.wait(version, batches_left)
            self.buffer.changed.notify_all()  # groups that the trainer waits for may be admitted now
            self._drop_stale()
            groups, stats = self.buffer.take(version, on_wait=self._raise_error)
            self._drop_stale()
        stats.seconds_waiting = time.perf_counter() - start
        self._deliver_messages()
        return groups, stats

    def publish(self, weights: Weights, version: int, expected: CanaryPrediction | None = None) -> None:
        """Copies the weights, so that training can continue; each engine loads them before its next request."""
        update = WeightUpdate(version, share(weights), expected)
        with self.buffer.changing():
            self.update = update
            if self._continues:
                self._abort()

    def evaluate_with(self, weights: Weights, version: int, function: Callable[[Engine], Result]) -> Result:
        """Pauses the engine threads first: requests are finished, or aborted with `trainer.unfinished = "continue"`.

        A lost engine is started again; after `MAX_RESTARTS` losses the next engine takes its place.
        """
        with self._pause_engines(abort=self._continues), ExitStack() as stack:
            shared, living = None, [thread for thread in self._threads if not thread.is_lost]
            altered = self.collector.config.engine.changes_weights
            for thread in living:
                with suppress(EngineDeadError):  # it does not come back
                    while True:
                        try:
                            if altered or thread.version != version or thread.engine.policy_version != version:
                                shared = shared or stack.enter_context(closing(share(weights)))
                                thread.version = None
                                thread.engine.update_weights(shared, version, as_is=True)
                            return function(thread.engine)
                        except EngineDeadError as error:
                            thread.restart(error)
                            self._deliver_messages()
            numbers = ", ".join(str(thread.number) for thread in living)
            raise EngineDeadError(f"engine {numbers} was lost {MAX_RESTARTS} times in a row: look at what ends it")

    def _weights(self) -> Weights:
        """Tied weights are saved under their first name only."""
        published = () if self.update is None else self.update.weights
        return ((name, weight) for name, weight, first in with_first_names(published) if first == name)

    def _restore_weights(self, weights: Weights, version: int) -> None:
        self.publish(weights, version)

    def restore(self, tensors: Mapping[str, Mapping[str, Tensor]], meta: Any, files: Mapping[str, bytes]) -> None:
        with self._pause_engines(abort=True):  # requests in progress are dropped, finished or not
            for thread in self._threads:
                thread.dropped, thread.version = True, None
            super().restore(tensors, meta, files)

    def close(self) -> None:
        with self.buffer.changing():
            self.closed = True
            self._abort()
        self.unscored.put((-1, None))
        threads = [*(thread.thread for thread in self._threads), self._scoring] if self._started else []
        # A thread finishes an environment call in progress, then closes the environments of its request.
        deadline = time.monotonic() + SHUTDOWN_TIMEOUT + self.collector.responses.seconds_to_end
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for thread in self._threads:
            thread.engine.close()
        self._threads.clear()  # they refer to this source, whose weights could not be freed at once

    @property
    def _continues(self) -> bool:
        """Whether new weights interrupt requests in progress, which then continue with them."""
        return self.collector.config.trainer.unfinished == "continue"

    def _abort(self) -> None:
        for thread in self._threads:
            thread.interrupt.set()

    def _drop_stale(self) -> None:
        """Drops groups that are too old for every later batch, and aborts their generation.

        This happens only after a batch of groups without signal: such a batch advances the version without consuming
        groups that were generated ahead.
        """
        if not self.collector.config.trainer.dynamic_sampling:
            return
        self.buffer.expire()
        for thread in self._threads:
            if thread.request is not None and not self.buffer.is_live(thread.request):
                thread.interrupt.set()

    def _raise_error(self) -> None:
        """Raises the error of another thread, if there is one, and delivers messages. Called before every wait."""
        if self._error is not None:
            raise self._error
        self._deliver_messages()

    def _deliver_messages(self) -> None:
        with self.buffer.changed:
            notes, self._notes = self._notes, []
        for line in notes:
            self._notify(line)

    @contextmanager
    def _pause_engines(self, *, abort: bool) -> Iterator[None]:
        with self.buffer.changed:
            self.paused = True
            if abort:
                self._abort()
            self.buffer.changed.notify_all()
            self._raise_error()
            while not self._is_paused():
                self.buffer.changed.wait()
                self._raise_error()
        try:
            yield
        finally:
            with self.buffer.changing():
                self.paused = False

    def _is_paused(self) -> bool:
        return all(thread.idle for thread in self._threads) and not self.unscored.unfinished_tasks

    def _score_all(self) -> None:
        """Runs the scoring thread: scores responses, oldest groups first, and puts usable groups into the buffer."""
        try:
            while (generated := self.unscored.get()[1]) is not None:
                self._score(generated)
                with self.buffer.changing():
                    self.unscored.task_done()
        except BaseException as error:
            self.fail(error)

    def _score(self, generated: GeneratedGroups) -> None:
        if self.buffer.is_live(generated.request):
            self.buffer.deliver(generated, self.collector.score_groups(generated))
            return
        stats = generated.stats
        stats.response_tokens += sum(one.sampled_tokens for group in generated.completions for one in group)
        self.buffer.count(stats)  # too old for every later batch: scores are not needed


class SourceClosed(Exception):
    """The rollout source was closed."""


class EngineThread:
    """The thread of one engine."""

    def __init__(self, number: int, engine: Engine, source: AsyncSource) -> None:
        self.number, self.engine, self.source, self.buffer = number, engine, source, source.buffer
        self.interrupt = threading.Event()
        self.version: int | None = None  # of the engine's weights; None: unknown
        self.request: GroupRequest | None = None
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
            self.source.fail(error)

    def _run_once(self) -> None:
        """Generates one request; if the engine is lost, requeues the request and restarts the engine."""
        self.request = None
        try:
            generated = self._generate(self._next())
        except EngineDeadError as lost:
            if self.request is not None and not self.dropped:
                self.buffer.repeat(self.request)
            self.restart(lost)
            return
        self._losses = 0
        if not self.dropped:
            self.source.unscored.put((generated.request.first, generated))

    def _next(self) -> GroupRequest:
        """Waits for a request that may be generated under the engine's weights; loads newer weights first."""
        changed, schedule = self.buffer.changed, self.buffer.schedule
        while True:
            with changed:
                while (update := self._wait_if_paused()) is None and self.version is not None:
                    self.request = schedule.admit(self.source.chunk, self.version)
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
        while self.source.paused and not self.source.closed:
            if not self.idle:
                self.idle = True
                self.buffer.changed.notify_all()
            self.buffer.changed.wait()
        self.idle = False
        self.interrupt.clear()
        if self.source.closed:
            raise SourceClosed
        newest = self.source.update
        return newest if newest is not None and newest.version != self.version else None

    def _update_weights(self, update: WeightUpdate) -> None:
        self.version = None
        stats = publish(self.engine, update.weights, update.version, self.source.canary, update.expected)
        self.buffer.count(stats)
        self.version = update.version

    def _generate(self, request: GroupRequest) -> GeneratedGroups:
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

        generated = self.source.collector.responses.respond(request, generate)
        stats.seconds_generating = time.perf_counter() - start
        generated.stats.add(stats)
        return generated

    def _resume(self, request: GroupRequest) -> bool:
        """Loads newer weights, if there are any; returns False if the request was dropped meanwhile."""
        with self.buffer.changed:
            update = self._wait_if_paused()
        if self.dropped or not self.buffer.is_live(request):
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
                self.source.sleep(RESTART_BACKOFF * 2.0 ** (self._losses - 2))
            with self.buffer.changed:
                if self.source.closed:
                    raise SourceClosed
            self.source.note(f"engine {self.number} was lost ({lost}); starting it again")
            try:
                self.engine.restart()
            except EngineDeadError as error:
                lost = error
                continue
            except TrimtabError as error:
                raise EngineDeadError(str(error)) from error
            self.buffer.count(RolloutStats(restarts=1))
            return

    def _give_up(self, error: EngineDeadError) -> None:
        """Ends this thread; if no other engine is left, the run fails."""
        with self.buffer.changed:
            self.is_lost = self.idle = True
            if self.source.all_lost:  # with the lock held: a thread that sees it also sees the error
                self.source.fail(TrimtabError(f"{error}; no engine is left: mend it, then {RESUME}"))
            else:
                self.source.note(f"engine {self.number} does not come back ({error}); the others go on without it")
