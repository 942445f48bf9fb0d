"""Asynchronous rollouts: one thread per engine, one scoring thread, one buffer, staleness bounded per token.

engine threads --responses--> scoring --groups--> buffer --batches--> trainer
     ^_________________________ weight updates ________________________/
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any

from trimtab.errors import EngineDeadError
from trimtab.trainer.engines.weight_transfer import share, with_first_names
from trimtab.trainer.rollout.buffer import Buffer
from trimtab.trainer.rollout.canary import Canary, CanaryPrediction
from trimtab.trainer.rollout.collector import Collector, Group
from trimtab.trainer.rollout.engine_thread import MAX_RESTARTS, AsyncState, EngineThread, WeightUpdate
from trimtab.trainer.rollout.responses import GeneratedGroups
from trimtab.trainer.rollout.rollout_stats import RolloutStats
from trimtab.trainer.rollout.source import BufferedSource, Result, Weights
from trimtab.types import Engine

SHUTDOWN_TIMEOUT = 5.0  # seconds to wait for threads to end before their engines are closed


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
        trainer = collector.config.trainer
        self._state = AsyncState(
            collector, buffer, trainer.unfinished, chunk=-(-trainer.prompts // len(engines)), canary=canary
        )
        for engine in engines:
            if hasattr(engine, "notify"):  # called in the engine's thread, where messages are queued
                engine.notify = self._state.note  # pyright: ignore[reportAttributeAccessIssue]
        self._threads = [EngineThread(number, engine, self._state) for number, engine in enumerate(engines)]
        self._scoring = threading.Thread(target=self._score_all, name="scoring", daemon=True)
        self._notify = notify
        self._started = False

    @property
    def published(self) -> int:
        return -1 if self._state.update is None else self._state.update.version

    def take(self, version: int, batches_left: int) -> tuple[list[Group], RolloutStats]:
        start, state = time.perf_counter(), self._state
        if not self._started:
            self._started = True
            state.working = len(self._threads)
            for thread in (*(thread.thread for thread in self._threads), self._scoring):
                thread.start()
        with state.buffer.changed:
            self._raise_error()  # if the batch is ready, the call below does not wait and so raises nothing
            state.buffer.schedule.wait(version, batches_left)
            state.buffer.changed.notify_all()  # groups that the trainer waits for may be admitted now
            self._drop_stale()
            groups, stats = state.buffer.take(version, on_wait=self._raise_error)
            self._drop_stale()
        stats.seconds_waiting = time.perf_counter() - start
        self._deliver_messages()
        return groups, stats

    def publish(self, weights: Weights, version: int, expected: CanaryPrediction | None = None) -> None:
        """Copies the weights, so that training can continue; each engine loads them before its next request."""
        update, state = WeightUpdate(version, share(weights), expected), self._state
        with state.buffer.changed:
            state.update = update
            if state.in_flight == "continue":
                self._abort()
            state.buffer.changed.notify_all()

    def evaluate_with(self, weights: Weights, version: int, function: Callable[[Engine], Result]) -> Result:
        """Pauses the engine threads first: requests are finished, or aborted with `in_flight = "continue"`.

        A lost engine is started again; after `MAX_RESTARTS` losses the next engine takes its place.
        """
        with self._pause_engines(abort=self._state.in_flight == "continue"), ExitStack() as stack:
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
        published = () if self._state.update is None else self._state.update.weights
        return ((name, weight) for name, weight, first in with_first_names(published) if first == name)

    def _restore_weights(self, weights: Weights, version: int) -> None:
        self.publish(weights, version)

    def rewind(self, meta: Any, files: Mapping[str, bytes]) -> None:
        with self._pause_engines(abort=True):  # requests in progress are dropped, finished or not
            for thread in self._threads:
                thread.dropped, thread.version = True, None
            super().rewind(meta, files)

    def close(self) -> None:
        state = self._state
        with state.buffer.changed:
            state.closed = True
            self._abort()
            state.buffer.changed.notify_all()
        threads = [*(thread.thread for thread in self._threads), self._scoring] if self._started else []
        # A thread finishes an environment call in progress, then closes the environments of its request.
        deadline = time.monotonic() + SHUTDOWN_TIMEOUT + self.collector.responses.seconds_to_end
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for thread in self._threads:
            thread.engine.close()

    def _abort(self) -> None:
        for thread in self._threads:
            thread.interrupt.set()

    def _drop_stale(self) -> None:
        """Drops groups that are too old for every later batch, and aborts their generation.

        This happens only after a batch of groups without signal: such a batch advances the version without consuming
        groups that were generated ahead.
        """
        state = self._state
        if not self.collector.config.trainer.dynamic_sampling:
            return
        state.buffer.expire()
        for thread in self._threads:
            if thread.request is not None and not state.buffer.is_live(thread.request):
                thread.interrupt.set()

    def _raise_error(self) -> None:
        """Raises the error of another thread, if there is one, and delivers messages. Called before every wait."""
        if self._state.error is not None:
            raise self._state.error
        self._deliver_messages()

    def _deliver_messages(self) -> None:
        with self._state.buffer.changed:
            notes, self._state.notes = self._state.notes, []
        for line in notes:
            self._notify(line)

    @contextmanager
    def _pause_engines(self, *, abort: bool) -> Iterator[None]:
        state = self._state
        with state.buffer.changed:
            state.paused = True
            if abort:
                self._abort()
            state.buffer.changed.notify_all()
            self._raise_error()
            while not self._is_paused():
                state.buffer.changed.wait()
                self._raise_error()
        try:
            yield
        finally:
            with state.buffer.changed:
                state.paused = False
                state.buffer.changed.notify_all()

    def _is_paused(self) -> bool:
        state = self._state
        return all(thread.idle for thread in self._threads) and not state.unscored and not state.scoring

    def _score_all(self) -> None:
        """Runs the scoring thread: scores responses, oldest groups first, and puts usable groups into the buffer."""
        try:
            while (generated := self._next_unscored()) is not None:
                self._score(generated)
        except BaseException as error:
            self._state.fail(error)

    def _next_unscored(self) -> GeneratedGroups | None:
        state = self._state
        with state.buffer.changed:
            state.scoring = False
            state.buffer.changed.notify_all()
            state.buffer.changed.wait_for(lambda: state.closed or state.unscored)
            if state.closed:
                return None
            oldest = min(state.unscored, key=lambda generated: generated.request.first)
            state.unscored.remove(oldest)
            state.scoring = True
            return oldest

    def _score(self, generated: GeneratedGroups) -> None:
        if self.buffer.is_live(generated.request):
            self.buffer.deliver(generated, self.collector.score_groups(generated))
            return
        stats = generated.stats
        stats.response_tokens += sum(one.sampled_tokens for group in generated.completions for one in group)
        self.buffer.count(stats)  # too old for every later batch: scores are not needed
