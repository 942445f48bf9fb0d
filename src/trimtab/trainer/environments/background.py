"""Runs calls of environments in background threads, with a timeout."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
import queue
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

from trimtab.errors import error_text


class EnvironmentFailed(Exception):
    """An environment failed: it raised an error that is not allowed, or timed out. Its episode is dropped."""


class BackgroundCall(Future[Any]):
    """A function call that an `EnvironmentThread` runs. It times out `timeout` seconds after it started.

    convert: converts the result of the function, in the same thread and within the same timeout. slots: limits how many
    calls run at a time. While a call waits for a slot, its time does not run. Only for functions that always end: a
    call that times out keeps its slot until it has ended.
    """

    def __init__(
        self,
        function: Callable[[], Any],
        timeout: float,
        convert: Callable[[Any], Any] | None = None,
        slots: threading.Semaphore | None = None,
    ) -> None:
        super().__init__()
        self._function, self._convert, self._slots = function, convert, slots
        self._timeout, self._deadline = timeout, float("inf")
        self._begun = threading.Event()

    def run(self) -> None:
        """Runs the function; called by the thread."""
        with self._slots or contextlib.nullcontext():
            if not self.set_running_or_notify_cancel():
                return
            self._deadline = time.monotonic() + self._timeout
            self._begun.set()
            try:
                value = self._function()
                if inspect.isawaitable(value):
                    value = self._run_awaitable(value)
                self.set_result(value if self._convert is None else self._convert(value))
            except BaseException as error:
                self.set_exception(error)

    def wait(self, timeout: float) -> bool:
        """Waits for at most `timeout` seconds and returns whether the call has ended or timed out."""
        end = time.monotonic() + timeout
        if not self._begun.wait(None if timeout == float("inf") else timeout):
            return False
        concurrent.futures.wait([self], max(0.0, min(end, self._deadline) - time.monotonic()))
        return self.done() or time.monotonic() >= self._deadline

    def value(self) -> Any:
        """Returns the value of the call, after `wait` returned True.

        Raises `EnvironmentFailed` if the call timed out, and what the function or `convert` raised.
        """
        if not self.done():
            raise self._given_up()
        error = self.exception()
        if error is not None and not isinstance(error, Exception):  # sys.exit() in a tool must not end the trainer
            raise EnvironmentFailed(f"raised {error_text(error)}")
        return self.result()

    def _run_awaitable(self, awaitable: Awaitable[Any]) -> Any:
        # Wait for the loop for half of the timeout only: if it does not answer, the rest remains for a new loop.
        loop = _event_loop(self._timeout / 2)
        future = asyncio.run_coroutine_threadsafe(_result_of(awaitable), loop)
        concurrent.futures.wait([future], max(0.0, self._deadline - time.monotonic()))
        if not future.done():
            future.cancel()
            raise self._given_up()
        return future.result()

    def _given_up(self) -> EnvironmentFailed:
        return EnvironmentFailed(f"did not return within {self._timeout:g} s (environment.timeout)")


class EnvironmentThread:
    """The thread that runs all methods of one environment, so that objects bound to a thread work.

    A thread cannot be stopped: if a call does not return, its thread is abandoned until the process ends, and later
    calls run in a new thread.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[BackgroundCall | None] | None = None
        self._last: BackgroundCall | None = None

    def start(self, call: BackgroundCall) -> BackgroundCall:
        """Runs the call in the background and returns it."""
        if self._calls is None or (self._last is not None and not self._last.done()):
            self.end()
            self._calls = queue.SimpleQueue()
            threading.Thread(target=_run_all, args=(self._calls,), name="environment", daemon=True).start()
        self._last = call
        self._calls.put(call)
        return call

    def cancel(self) -> bool:
        """Cancels the last call if it has not started. Returns whether no call is in progress."""
        if self._last is not None and not self._last.done() and self._last.cancel():
            self.end()  # the thread may still wait for a slot: later calls run in a new one
        return self._last is None or self._last.done()

    def wait(self) -> None:
        """Waits until the call in progress has ended or timed out."""
        if self._last is not None:
            self._last.wait(float("inf"))

    def end(self) -> None:
        """Ends the thread after the call in progress."""
        if self._calls is not None:
            self._calls.put(None)
            self._calls = None


def in_background(function: Callable[[], Any], timeout: float) -> BackgroundCall:
    """Starts a call in a new thread."""
    thread = EnvironmentThread()
    call = thread.start(BackgroundCall(function, timeout))
    thread.end()
    return call


def _run_all(calls: queue.SimpleQueue[BackgroundCall | None]) -> None:
    while (call := calls.get()) is not None:
        call.run()
        del call  # frees its value while waiting for the next call


_loop: asyncio.AbstractEventLoop | None = None
_loop_lock = threading.Lock()


async def _result_of(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def _event_loop(patience: float) -> asyncio.AbstractEventLoop:
    """Returns the event loop of all coroutines: as in TRL, environments may share objects that are bound to a loop.

    If the loop does not answer within `patience` seconds, a coroutine blocks it, and a new loop replaces it.
    """
    global _loop
    with _loop_lock:
        answered = threading.Event()
        if _loop is not None:
            _loop.call_soon_threadsafe(answered.set)
        if _loop is None or not answered.wait(patience):
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_run_forever, args=(_loop,), name="environment-loop", daemon=True).start()
        return _loop


def _run_forever(loop: asyncio.AbstractEventLoop) -> None:
    while True:
        with contextlib.suppress(SystemExit, KeyboardInterrupt):  # raised by a coroutine; its call reports it too
            loop.run_forever()
