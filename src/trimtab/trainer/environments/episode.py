"""One episode: its state, and its environment, whose methods run in the background and are bounded in time."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from operator import methodcaller
from typing import Any

import numpy as np

from trimtab.errors import error_text
from trimtab.trainer.environments.background import BackgroundCall, EnvironmentFailed, EnvironmentThread
from trimtab.trainer.environments.environment import call_tool, row_for, text_of
from trimtab.trainer.environments.formats import Call
from trimtab.trainer.sandbox.function_pool import checked
from trimtab.types import EpisodeOutcome, IntArray, Prompt, TurnResult


@dataclass(slots=True)
class Episode:
    """The state of one response and its environment.

    Attributes:
        seed: what `reset` gets.
        timeout: seconds of one call.
        environment: None until it is made.
        tool_error: the first error of a call that raised or could not be made.
        failure: why the episode is dropped.
        ids: those of the response when its last turn was submitted, and of the result that followed.
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
    ids: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    length: int = 0
    call: BackgroundCall | None = None
    result: TurnResult | None = None
    tool_error: str | None = None
    thread: EnvironmentThread = field(default_factory=EnvironmentThread)

    def start_constructor(self, factory: Callable[[], Any]) -> BackgroundCall:
        """Begins to make the environment."""

        def make() -> None:
            self.environment = factory()

        return self._start(make)

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
        """Begins `get_reward`, whose value is a usable reward; None without it, and for an episode that failed."""
        return None if self.failure is not None else self._start_optional("get_reward", _usable)

    def start_close(self) -> BackgroundCall | None:
        """Begins `close`; None for a class without it. Where a call hangs it runs in a new thread."""
        return self._start_optional("close")

    def value(self, call: BackgroundCall, method: str) -> Any:
        """Returns the value of a call that must not fail, once it has ended; None where it fails, the `failure`."""
        value, failure = awaited(call)
        if failure is not None:
            self.failure = f"{method} {failure}"
        return value

    def _start_optional(self, method: str, convert: Callable[[Any], Any] | None = None) -> BackgroundCall | None:
        if not hasattr(type(self.environment), method):
            return None
        # Whatever the access to the method raises, it raises in the background.
        return self._start(partial(methodcaller(method), self.environment), convert)

    def _start(
        self,
        function: Callable[[], Any],
        convert: Callable[[Any], Any] | None = None,
        slots: threading.Semaphore | None = None,
    ) -> BackgroundCall:
        return self.thread.start(BackgroundCall(function, self.timeout, convert, slots))


def awaited(call: BackgroundCall) -> tuple[Any, str | None]:
    """Returns the value of a call once it has ended, or None and what happened instead."""
    call.wait(float("inf"))
    try:
        return call.value(), None
    except EnvironmentFailed as error:
        return None, str(error)
    except Exception as error:
        return None, f"raised {error_text(error)}"


def _usable(value: Any) -> float:
    outcome = checked(value)
    if outcome.value is None:
        raise EnvironmentFailed(outcome.error)
    return outcome.value


@dataclass(frozen=True)
class EpisodeCounts:
    """Counts over multi-turn responses: their number, calls, calls that raised, void responses, failed environments.

    `first_errors` has the first error of a call of each batch.
    """

    episodes: int = 0
    calls: int = 0
    tool_errors: int = 0
    void: int = 0
    failed: int = 0
    first_errors: tuple[str, ...] = ()

    @classmethod
    def of(cls, outcomes: Sequence[EpisodeOutcome]) -> EpisodeCounts:
        return cls(
            episodes=len(outcomes),
            calls=sum(outcome.calls for outcome in outcomes),
            tool_errors=sum(outcome.tool_errors for outcome in outcomes),
            void=sum(outcome.void for outcome in outcomes),
            failed=sum(outcome.failure is not None for outcome in outcomes),
            first_errors=tuple(outcome.tool_error for outcome in outcomes if outcome.tool_error is not None)[:1],
        )

    def __add__(self, other: EpisodeCounts) -> EpisodeCounts:
        return EpisodeCounts(*(getattr(self, item.name) + getattr(other, item.name) for item in fields(self)))

    def message(self) -> str | None:
        """Returns what the first call raised where all calls failed, else None."""
        if not self.first_errors or self.tool_errors < self.calls:
            return None
        return f"all {self.calls} calls of tools failed, the first: {self.first_errors[0]}"

    def as_dict(self) -> dict[str, float]:
        """Returns calls of an episode, the share of calls that raised, the share of void episodes, and failed ones.

        They are those of the metrics `episode/*` of training.
        """
        return {
            "calls": self.calls / max(self.episodes, 1),
            "tool_errors": self.tool_errors / max(self.calls, 1),
            "void": self.void / max(self.episodes, 1),
            "failed": self.failed,
        }

    def columns(self) -> dict[str, str]:
        """Returns the same numbers as text, by the titles of table columns."""
        shares = self.as_dict()
        return {
            "calls an episode": f"{shares['calls']:.2f}",
            "tool errors": f"{shares['tool_errors']:.1%}",
            "void": f"{shares['void']:.1%}",
            "failed episodes": str(self.failed),
        }
