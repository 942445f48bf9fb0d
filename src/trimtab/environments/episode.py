"""One episode: its state, and its environment, whose methods run in the background and are bounded in time."""

from __future__ import annotations

import copy
import reprlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from trimtab.environments.background import (
    BackgroundCall,
    EnvironmentFailed,
    EnvironmentThread,
    describe,
    in_background,
)
from trimtab.environments.environment import call_tool, row_for, text_of
from trimtab.environments.formats import Call
from trimtab.types import Prompt, TurnResult


@dataclass(slots=True)
class Episode:
    """The state of one response and its environment.

    Attributes:
        seed: what `reset` gets.
        timeout: seconds of one call.
        environment: None until it is made; changed under `lock`.
        failure: why the episode is dropped.
        length: tokens of the response when its last turn was submitted.
        call, result: the call of a tool at the end of that turn, and what follows it once it is known.
    """

    prompt: Prompt
    seed: int
    timeout: float
    environment: Any = None
    calls: int = 0
    tool_errors: int = 0
    failure: str | None = None
    reward: float | None = None
    length: int = 0
    call: BackgroundCall | None = None
    result: TurnResult | None = None
    thread: EnvironmentThread = field(default_factory=EnvironmentThread)
    lock: threading.Lock = field(default_factory=threading.Lock)
    closed: bool = False

    def start_constructor(self, factory: Callable[[], Any]) -> BackgroundCall:
        """Begins to make the environment."""
        return self._start(partial(self._make, factory))

    def _make(self, factory: Callable[[], Any]) -> None:
        """Makes the environment, and closes it at once where the episode was closed meanwhile."""
        environment = factory()
        with self.lock:
            closed = self.closed
            self.environment = None if closed else environment
        if closed and _has(environment, "close"):
            in_background(partial(_call, environment, "close"), self.timeout)

    def start_reset(self) -> BackgroundCall:
        """Begins `reset`, whose value is a text."""
        return self._start(self._reset, text_of)

    def _reset(self) -> Any:
        """Returns what `reset` returns, or an awaitable."""
        problem, reset = self.prompt.problem, self.environment.reset
        # A copy: what an environment changes in its row must not be in the next episode's.
        extra = copy.deepcopy(dict(problem.extra))
        columns = {**extra, "id": problem.id, "question": problem.question, "answer": problem.answer}
        return reset(**row_for(reset, columns, self.seed))

    def start_tool(self, call: Call, slots: threading.Semaphore | None) -> BackgroundCall:
        """Begins a call of a tool, whose value is a text; `slots` are those of `BackgroundCall`."""
        return self._start(partial(call_tool, self.environment, call), text_of, slots)

    def start_reward(self) -> BackgroundCall | None:
        """Begins `get_reward`, whose value is a finite number; None without it, and for an episode that failed."""
        if self.failure is not None or not _has(self.environment, "get_reward"):
            return None
        return self._start(partial(_call, self.environment, "get_reward"), _finite)

    def start_close(self) -> BackgroundCall | None:
        """Begins `close`; None for a class without it, and where the environment is not made yet: it is closed then."""
        with self.lock:
            self.closed = True
        if not _has(self.environment, "close"):
            return None
        return self._start(partial(_call, self.environment, "close"))

    def value(self, call: BackgroundCall, method: str) -> Any:
        """Returns the value of a call that must not fail, once it has ended; None where it fails, the `failure`."""
        call.wait(float("inf"))
        try:
            return call.value()
        except EnvironmentFailed as error:
            failure = str(error)
        except Exception as error:
            failure = f"raised {describe(error)}"
        self.failure = f"{method} {failure}"
        return None

    def _start(
        self,
        function: Callable[[], Any],
        convert: Callable[[Any], Any] | None = None,
        slots: threading.Semaphore | None = None,
    ) -> BackgroundCall:
        return self.thread.start(BackgroundCall(function, self.timeout, convert, slots))


def _has(environment: Any, method: str) -> bool:
    return hasattr(type(environment), method)


def _call(environment: Any, method: str) -> Any:
    """Returns what a method returns, or an awaitable. Whatever the access to it raises, it raises in the background."""
    return getattr(environment, method)()


def _finite(value: Any) -> float:
    try:
        number = float("nan") if isinstance(value, str | bytes | bytearray) else float(value)
    except Exception:
        number = float("nan")
    if not np.isfinite(number):
        raise EnvironmentFailed(f"returned {reprlib.repr(value)}, not a finite number")
    return number
