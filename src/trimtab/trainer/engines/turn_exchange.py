"""Exchanges turns with a `TurnHandler` while responses are sampled: submits ended turns, returns their results."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from trimtab.trainer.engines.decoding_rows import DecodingRow
from trimtab.trainer.engines.stopping import StopChecker
from trimtab.types import AbortSignal, Completion, SamplingParams, TurnHandler, TurnResult

# A result joins the batch this many decoding steps after its turn ended, not as soon as it is known: which rows are
# decoded together then does not depend on the clock, and a run repeats bit for bit.
DELAY = 8
# Seconds that decoding waits for results that are due. A later one joins when it is known; roundings may then differ
# between two runs.
MAX_WAIT = 1.0
POLL_INTERVAL = 0.05  # seconds between two checks of the abort signal, or of a result that is not known


@dataclass(frozen=True, slots=True, eq=False)
class _Turn:
    row: DecodingRow
    due: int  # the step at which its result joins


class TurnExchange:
    """The turns in progress of one batch. Call `join` once for each decoding step.

    Args:
        handler: decides what follows a turn.
        abort: the signal of the call; it ends every wait.
    """

    def __init__(self, handler: TurnHandler, abort: AbortSignal | None) -> None:
        self.max_turn_tokens = handler.max_turn_tokens
        self._handler, self._abort = handler, abort
        self._step = 0
        self._turns: list[_Turn] = []  # by step

    @property
    def waiting(self) -> bool:
        """Whether results are outstanding."""
        return bool(self._turns)

    def submit(self, row: DecodingRow, completion: Completion) -> None:
        """Submits the turn of `row` that ended in the current step; `completion` is the response so far.

        A response that ends with this turn is complete at once, as in a call without turns.
        """
        finish = self._handler.submit(row.prompt, row.sample, completion)
        if finish is not None:
            row.finish, row.complete = finish, True
            return
        row.waiting = True
        self._turns.append(_Turn(row, self._step + DELAY))

    def join(self, max_tokens: int, *, idle: bool) -> list[DecodingRow]:
        """Applies the results that join now, in the order in which their turns ended; returns the rows that go on.

        Args:
            idle: no row is being decoded. Steps up to the next result that continues a row are skipped, and the list is
                empty only if the call was aborted or nothing is outstanding.
        """
        while True:
            results = self._results(idle=idle)
            for row, result in results:
                row.end_turn(result, max_tokens)
            rows = [row for row, _ in results if not row.complete]
            if rows or not (idle and results):
                return rows

    def _results(self, *, idle: bool) -> list[tuple[DecodingRow, TurnResult]]:
        self._step += 1
        if idle and self._turns:
            self._step = max(self._step, self._turns[0].due)
        deadline = time.monotonic() + MAX_WAIT
        results: list[tuple[DecodingRow, TurnResult]] = []
        for turn in [turn for turn in self._turns if turn.due <= self._step]:
            # A result that was waited for once is not waited for again.
            results += self._poll(turn, deadline if turn.due == self._step else None)
        while idle and self._turns and not results and not self._aborted():
            for turn in list(self._turns):
                results += self._poll(turn, time.monotonic() + POLL_INTERVAL / len(self._turns))
        return results

    def _poll(self, turn: _Turn, deadline: float | None) -> list[tuple[DecodingRow, TurnResult]]:
        """Returns the result of a turn if it is known before `deadline` (None: now), and an empty list otherwise."""
        while True:
            wait = 0.0 if deadline is None else max(0.0, min(POLL_INTERVAL, deadline - time.monotonic()))
            result = self._handler.result(turn.row.prompt, turn.row.sample, wait)
            if result is not None:
                self._turns.remove(turn)
                turn.row.waiting = False
                return [(turn.row, result)]
            if wait == 0 or self._aborted():
                return []

    def _aborted(self) -> bool:
        return self._abort is not None and self._abort.is_set()


def resume_turns(
    handler: TurnHandler | None,
    abort: AbortSignal | None,
    rows: Iterable[DecodingRow],
    stop: StopChecker,
    version: int,
    sampling: SamplingParams,
) -> TurnExchange | None:
    """Returns the exchange of a call, after it completed turns that had ended when an earlier call was aborted.

    Appends their observations. Rows whose result does not come because of another abort keep their finish reason, and
    are `waiting`. Returns None without a handler.
    """
    if handler is None:
        return None
    exchange = TurnExchange(handler, abort)
    for row in rows:
        if not row.complete and row.turn_start < len(row.ids) and stop.ended([row.ids[row.turn_start :]])[0]:
            exchange.submit(row, row.completion(version, stop))
    while joined := exchange.join(sampling.max_tokens, idle=True):
        for row in joined:
            row.append_observation(truncated=sampling.truncated)
    return exchange
