"""One episode: its state and its environment, whose methods run in the background with a timeout."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from operator import methodcaller
from typing import Any

import numpy as np

from trimtab.errors import error_text
from trimtab.trainer.environments.background import BackgroundCall, EnvironmentFailed, EnvironmentThread
from trimtab.trainer.environments.environment import call_tool, make_row, text_of
from trimtab.trainer.environments.formats import Call
from trimtab.trainer.sandbox.function_pool import check_value
from trimtab.types import EpisodeOutcome, IntArray, Prompt, TurnResult


@dataclass(slots=True)
class Episode:
    """The state of one response and its environment."""

    prompt: Prompt
    seed: int  # for `reset`
    timeout: float  # seconds of one call
    environment: Any = None  # None until it is created
    calls: int = 0
    tool_errors: int = 0
    failure: str | None = None  # why the episode is dropped
    reward: float | None = None
    # Token ids of the response up to the last turn that was submitted, followed by the result of that turn.
    ids: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    length: int = 0  # number of tokens of the response up to the last turn that was submitted
    call: BackgroundCall | None = None  # the tool call at the end of that turn
    result: TurnResult | None = None  # what follows that turn, if it is known
    tool_error: str | None = None  # the first error of a tool call
    thread: EnvironmentThread = field(default_factory=EnvironmentThread)

    def start_constructor(self, factory: Callable[[], Any]) -> BackgroundCall:
        """Starts to create the environment."""

        def make() -> None:
            self.environment = factory()

        return self._start(make)

    def start_reset(self) -> BackgroundCall:
        """Starts `reset`; the value of the call is a text."""

        def reset() -> Any:
            method = self.environment.reset
            return method(**make_row(method, self.prompt.problem, self.seed))

        return self._start(reset, text_of)

    def start_tool(self, call: Call, slots: threading.Semaphore | None) -> BackgroundCall:
        """Starts a tool call; the value of the call is a text. `slots` is passed to `BackgroundCall`."""
        return self._start(partial(call_tool, self.environment, call), text_of, slots)

    def start_optional(self, method: str, convert: Callable[[Any], Any] | None = None) -> BackgroundCall | None:
        """Starts a method without arguments. Returns None if the class has no such method."""
        if not hasattr(type(self.environment), method):
            return None
        # The method is looked up in the background too, because the lookup may raise.
        return self._start(partial(methodcaller(method), self.environment), convert)

    def value(self, call: BackgroundCall, method: str) -> Any:
        """Waits for a call that must not fail and returns its value. If it fails, sets `failure` and returns None."""
        value, failure = wait_for(call)
        if failure is not None:
            self.failure = f"{method} {failure}"
        return value

    def _start(
        self,
        function: Callable[[], Any],
        convert: Callable[[Any], Any] | None = None,
        slots: threading.Semaphore | None = None,
    ) -> BackgroundCall:
        return self.thread.start(BackgroundCall(function, self.timeout, convert, slots))


def wait_for(call: BackgroundCall) -> tuple[Any, str | None]:
    """Waits for a call. Returns its value and None, or None and a description of its failure."""
    call.wait(float("inf"))
    try:
        return call.value(), None
    except EnvironmentFailed as error:
        return None, str(error)
    except Exception as error:
        return None, f"raised {error_text(error)}"


def usable_reward(value: Any) -> float:
    """Returns the value of `get_reward`. Raises `EnvironmentFailed` if it is not a finite number."""
    outcome = check_value(value)
    if outcome.value is None:
        raise EnvironmentFailed(outcome.error)
    return outcome.value


@dataclass(frozen=True)
class EpisodeCounts:
    """Counts over multi-turn responses."""

    episodes: int = 0
    calls: int = 0
    tool_errors: int = 0  # calls that raised or could not be parsed
    void: int = 0  # responses without an answer
    failed: int = 0  # episodes whose environment failed
    first_errors: tuple[str, ...] = ()  # the first error of a call in each batch

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
        """Returns a message with the first error if all calls failed, else None."""
        if not self.first_errors or self.tool_errors < self.calls:
            return None
        return f"all {self.calls} calls of tools failed, the first: {self.first_errors[0]}"

    def as_dict(self) -> dict[str, float]:
        """Returns the metrics `episode/*` of training.

        These are calls per episode, the share of calls that failed, the share of void episodes, and the number of
        failed episodes.
        """
        return {
            "calls": self.calls / max(self.episodes, 1),
            "tool_errors": self.tool_errors / max(self.calls, 1),
            "void": self.void / max(self.episodes, 1),
            "failed": self.failed,
        }

    def columns(self) -> dict[str, str]:
        """Returns the numbers of `as_dict` as text, by the titles of table columns."""
        shares = self.as_dict()
        return {
            "calls an episode": f"{shares['calls']:.2f}",
            "tool errors": f"{shares['tool_errors']:.1%}",
            "void": f"{shares['void']:.1%}",
            "failed episodes": str(self.failed),
        }
