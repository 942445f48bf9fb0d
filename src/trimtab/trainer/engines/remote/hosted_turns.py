"""Messages between a hosted engine and its caller, and the turn handler that forwards turns to the caller.

They are not in `engine_host.py`, because the caller could not unpickle classes of another process's main module.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from trimtab.types import Completion, TurnResult

# (result, error, (`policy_version`, `decoded_tokens`, `prefilled_tokens`) of the hosted engine). The error is a
# `TrimtabError`, or the traceback of any other exception as text.
CallResult = tuple[Any, Exception | str | None, tuple[int, int, int]]


class EndedTurn(NamedTuple):
    """The arguments of `TurnHandler.submit` in call number `call`. Sent from the host to the caller."""

    call: int
    prompt: int
    sample: int
    completion: Completion


class HandledTurn(NamedTuple):
    """The result of a turn in call number `call`. Sent from the caller to the host."""

    call: int
    prompt: int
    sample: int
    result: TurnResult


class HostedTurns:
    """The `types.TurnHandler` of a hosted engine: asks the caller. `handled` is called from another thread."""

    def __init__(self, call: int, max_turn_tokens: int, send: Callable[[EndedTurn], None]) -> None:
        self.max_turn_tokens = max_turn_tokens
        self._call, self._send = call, send
        self._results: dict[tuple[int, int], TurnResult] = {}
        self._changed = threading.Condition()

    def submit(self, prompt: int, sample: int, completion: Completion) -> None:
        # Returns None: the caller decides whether the response ends, and the engine does not wait for the answer.
        self._send(EndedTurn(self._call, prompt, sample, completion))

    def result(self, prompt: int, sample: int, timeout: float) -> TurnResult | None:
        with self._changed:
            self._changed.wait_for(lambda: (prompt, sample) in self._results, timeout)
            return self._results.pop((prompt, sample), None)

    def handled(self, turn: HandledTurn) -> None:
        """Receives a result; ignores results of earlier calls, which were aborted."""
        if turn.call == self._call:
            with self._changed:
                self._results[turn.prompt, turn.sample] = turn.result
                self._changed.notify_all()
