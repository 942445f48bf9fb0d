"""Calls of environments that run in the background and are bounded in time."""

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
    """An environment raised where it must not, or did not return in time; its episode is dropped."""


class BackgroundCall(Future[Any]):
    """A function that an `EnvironmentThread` runs, given up `timeout` seconds after it began.

    Args:
        convert: makes the value of what the function returned, in the same thread and the same time.
        slots: how many such calls may run at a time; one that waits for a slot has not begun.
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
        self._begun, self._lock = threading.Event(), threading.Lock()
        self._holds_slot = False

    def run(self) -> None:
        """Runs the function; called by the thread."""
        if self._slots is not None:
            self._slots.acquire()
            self._holds_slot = True
        if self.set_running_or_notify_cancel():
            self._deadline = time.monotonic() + self._timeout
            self._begun.set()
            try:
                value = self._function()
                if inspect.isawaitable(value):
                    value = self._run_awaitable(value)
                self.set_result(value if self._convert is None else self._convert(value))
            except BaseException as error:
                self.set_exception(error)
        self._release_slot()

    def wait(self, timeout: float) -> bool:
        """Returns whether the call has ended or was given up, after at most `timeout` seconds.

        One that is given up frees its slot: a call that hangs must not keep others from beginning.
        """
        end = time.monotonic() + timeout
        if not self._begun.wait(None if timeout == float("inf") else timeout):
            return False
        concurrent.futures.wait([self], max(0.0, min(end, self._deadline) - time.monotonic()))
        ended = self.done() or time.monotonic() >= self._deadline
        if ended:
            self._release_slot()
        return ended

    def value(self) -> Any:
        """Returns what the function returned, once `wait` is True.

        Raises:
            EnvironmentFailed: it did not return in time.
            Exception: what the function or `convert` raised.
        """
        if not self.done():
            raise self._given_up()
        error = self.exception()
        if error is not None and not isinstance(error, Exception):  # sys.exit() of a tool must not end the trainer
            raise EnvironmentFailed(f"raised {error_text(error)}")
        return self.result()

    def _release_slot(self) -> None:
        with self._lock:
            held, self._holds_slot = self._holds_slot, False
        if held and self._slots is not None:
            self._slots.release()

    def _run_awaitable(self, awaitable: Awaitable[Any]) -> Any:
        # Half of the time: after that of a loop that does not answer, some remains for the call in a new one.
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
    """The thread that runs all methods of one environment, so that what is bound to a thread works in it.

    A thread cannot be stopped: where a call does not return, the thread stays behind until the process ends, and the
    calls after it run in a new one.
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
        """Keeps a call that has not begun from running; returns whether none is in progress."""
        if self._last is not None and not self._last.done() and self._last.cancel():
            self.end()  # the thread may still wait for a slot: later calls run in a new one
        return self._last is None or self._last.done()

    def wait(self) -> None:
        """Waits until the call in progress has ended or is given up."""
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
        del call  # what it returned is not held while the next one is waited for


_loop: asyncio.AbstractEventLoop | None = None
_loop_lock = threading.Lock()


async def _result_of(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def _event_loop(patience: float) -> asyncio.AbstractEventLoop:
    """Returns the one event loop of all coroutines, as in TRL: environments may share what is bound to a loop.

    A loop that does not answer within `patience` seconds is blocked by a coroutine, and a new one replaces it.
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
        with contextlib.suppress(SystemExit, KeyboardInterrupt):  # of a coroutine, whose call has it as well
            loop.run_forever()
