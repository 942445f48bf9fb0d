"""The messages of a hosted engine, and its turns: their `TurnHandler` is in the caller's process.

Not in `engine_host.py`, which is the main module of its process: the caller could not load messages of its classes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from trimtab.types import Completion, TurnResult

# The result; the error: a `TrimtabError` as itself, any other exception as its traceback; and `policy_version`,
# `decoded_tokens` and `prefilled_tokens` of the hosted engine.
CallResult = tuple[Any, Exception | str | None, tuple[int, int, int]]


class EndedTurn(NamedTuple):
    """The arguments of `TurnHandler.submit` in call number `call`; from the host to the caller."""

    call: int
    prompt: int
    sample: int
    completion: Completion


class HandledTurn(NamedTuple):
    """What follows a turn of call number `call`; from the caller to the host."""

    call: int
    prompt: int
    sample: int
    result: TurnResult


class HostedTurns:
    """The handler that a hosted engine gets (`types.TurnHandler`). `handled` is called from another thread."""

    def __init__(self, call: int, max_turn_tokens: int, send: Callable[[EndedTurn], None]) -> None:
        self.max_turn_tokens = max_turn_tokens
        self._call, self._send = call, send
        self._results: dict[tuple[int, int], TurnResult] = {}
        self._changed = threading.Condition()

    def submit(self, prompt: int, sample: int, completion: Completion) -> None:
        # The caller decides whether the response ends: not known yet, and the engine does not wait for the answer.
        self._send(EndedTurn(self._call, prompt, sample, completion))

    def result(self, prompt: int, sample: int, timeout: float) -> TurnResult | None:
        with self._changed:
            self._changed.wait_for(lambda: (prompt, sample) in self._results, timeout)
            return self._results.pop((prompt, sample), None)

    def handled(self, turn: HandledTurn) -> None:
        """Takes a result; one of an earlier call, which was aborted, is ignored."""
        if turn.call == self._call:
            with self._changed:
                self._results[turn.prompt, turn.sample] = turn.result
                self._changed.notify_all()
