"""Submits the ended turns of a generate call to its `TurnHandler`, and applies the results."""

from __future__ import annotations

import time
from collections.abc import Sequence

from trimtab.trainer.engines.decoding_rows import DecodingRow, GenerateCall
from trimtab.types import AbortSignal

# The result of a turn is applied this many decoding steps after the turn ended, not as soon as it is known. The rows
# that are decoded together then do not depend on the clock, and a run repeats bit for bit.
DELAY = 8
# Seconds that decoding waits for results that are due. A result that comes later is applied once it is known; rounding
# may then differ between two runs.
MAX_WAIT = 1.0
POLL_INTERVAL = 0.05  # seconds between two checks of the abort signal, or for the result of a turn


class TurnExchange:
    """Detects the ends of responses and turns in one call, and applies the results of turns.

    Call `join` once for each decoding step. `abort` ends every wait.
    """

    def __init__(self, call: GenerateCall, abort: AbortSignal | None) -> None:
        self._call, self._abort = call, abort
        self._step = 0
        self._waiting: list[DecodingRow] = []  # in the order in which their turns ended

    @property
    def aborted(self) -> bool:
        return self._abort is not None and self._abort.is_set()

    def resume(self) -> None:
        """Submits turns that had ended when an earlier call was aborted, and applies their results.

        If this call is aborted too, rows without a result stay `waiting` and keep their finish reason.
        """
        for row in self._call.rows:
            if self._call.has_ended_turn(row):
                self._submit(row)
        while joined := self.join(idle=True):
            for row in joined:
                row.append_observation(truncated=self._call.sampling.truncated)

    def detect_ends(self, rows: Sequence[DecodingRow]) -> None:
        """Ends the turn of each row whose last token is a stop, and completes rows without room for another token."""
        rows = [row for row in rows if row.sampled[-1]]  # a stop in an observation ends nothing
        for row, ended in zip(rows, self._call.stop.ended([row.turn_ids for row in rows]), strict=True):
            if ended:
                self._submit(row)
            else:
                row.complete = self._call.room(row) <= 0

    def _submit(self, row: DecodingRow) -> None:
        self._call.submit_turn(row)
        if row.waiting:
            row.due = self._step + DELAY
            self._waiting.append(row)

    def join(self, *, idle: bool) -> list[DecodingRow]:
        """Applies the results of turns that are due, in the order in which the turns ended; returns rows that go on.

        idle: whether no row is being decoded. If so, skips all steps before the next result that continues a row, and
        returns an empty list only if the call was aborted or no result is outstanding.
        """
        while True:
            joined = self._join(idle=idle)
            rows = [row for row in joined if not row.complete]
            if rows or not (idle and joined):
                return rows

    def _join(self, *, idle: bool) -> list[DecodingRow]:
        self._step += 1
        if idle and self._waiting:
            self._step = max(self._step, self._waiting[0].due)
        deadline = time.monotonic() + MAX_WAIT
        due = [row for row in self._waiting if row.due <= self._step]
        # A result that was waited for once is not waited for again.
        joined = [row for row in due if self._poll(row, deadline if row.due == self._step else None)]
        while idle and self._waiting and not joined and not self.aborted:
            patience = POLL_INTERVAL / len(self._waiting)
            joined += [row for row in list(self._waiting) if self._poll(row, time.monotonic() + patience)]
        return joined

    def _poll(self, row: DecodingRow, deadline: float | None) -> bool:
        """Applies the result of a turn if it is known before `deadline` (None: do not wait); returns whether it is."""
        assert self._call.turns is not None
        while True:
            wait = 0.0 if deadline is None else max(0.0, min(POLL_INTERVAL, deadline - time.monotonic()))
            result = self._call.turns.result(row.prompt, row.sample, wait)
            if result is not None:
                self._waiting.remove(row)
                row.end_turn(result, self._call.sampling.max_tokens)
                return True
            if wait == 0 or self.aborted:
                return False
