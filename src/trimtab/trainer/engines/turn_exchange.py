"""Ends responses while they are sampled, and exchanges their turns with a `TurnHandler`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from trimtab.trainer.engines.decoding_rows import DecodingRow
from trimtab.trainer.engines.stopping import StopChecker
from trimtab.types import AbortSignal, SamplingParams, TurnHandler, TurnResult

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
    """Ends the responses of one call, and their turns. Call `join` once for each decoding step.

    Args:
        handler: decides what follows a turn; None: a stop ends the response.
        abort: the signal of the call; it ends every wait.
        version: policy version of the weights.
    """

    def __init__(
        self,
        handler: TurnHandler | None,
        abort: AbortSignal | None,
        stop: StopChecker,
        version: int,
        sampling: SamplingParams,
    ) -> None:
        self.handler = handler
        self._abort, self._stop, self._version, self._sampling = abort, stop, version, sampling
        self._max_turn_tokens = None if handler is None else handler.max_turn_tokens
        self._step = 0
        self._turns: list[_Turn] = []  # by step

    @property
    def aborted(self) -> bool:
        """Whether the call was aborted."""
        return self._abort is not None and self._abort.is_set()

    def resume(self, rows: Sequence[DecodingRow]) -> None:
        """Completes turns that had ended when an earlier call was aborted, and appends their observations.

        Rows whose result does not come because of another abort keep their finish reason, and are `waiting`.
        """
        if self.handler is None:
            return
        for row in rows:
            if not row.complete and row.turn_ids and self._stop.ended([row.turn_ids])[0]:
                self._submit(row)
        while joined := self.join(idle=True):
            for row in joined:
                row.append_observation(truncated=self._sampling.truncated)

    def detect_ends(self, rows: Sequence[DecodingRow]) -> None:
        """Completes the rows whose last token ends them, and submits the turns that it ends."""
        rows = [row for row in rows if row.sampled[-1]]  # a stop in an observation ends nothing
        for row, ended in zip(rows, self._stop.ended([row.turn_ids for row in rows]), strict=True):
            if ended:
                self._submit(row)
            else:
                row.complete = row.room(self._sampling.max_tokens, self._max_turn_tokens) <= 0

    def _submit(self, row: DecodingRow) -> None:
        row.submit_turn(self.handler, self._version, self._stop)
        if row.waiting:
            self._turns.append(_Turn(row, self._step + DELAY))

    def join(self, *, idle: bool) -> list[DecodingRow]:
        """Applies the results that join now, in the order in which their turns ended; returns the rows that go on.

        Args:
            idle: no row is being decoded. Steps up to the next result that continues a row are skipped, and the list is
                empty only if the call was aborted or nothing is outstanding.
        """
        while True:
            results = self._results(idle=idle)
            for row, result in results:
                row.end_turn(result, self._sampling.max_tokens)
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
        while idle and self._turns and not results and not self.aborted:
            for turn in list(self._turns):
                results += self._poll(turn, time.monotonic() + POLL_INTERVAL / len(self._turns))
        return results

    def _poll(self, turn: _Turn, deadline: float | None) -> list[tuple[DecodingRow, TurnResult]]:
        """Returns the result of a turn if it is known before `deadline` (None: now), and an empty list otherwise."""
        assert self.handler is not None
        while True:
            wait = 0.0 if deadline is None else max(0.0, min(POLL_INTERVAL, deadline - time.monotonic()))
            result = self.handler.result(turn.row.prompt, turn.row.sample, wait)
            if result is not None:
                self._turns.remove(turn)
                return [(turn.row, result)]
            if wait == 0 or self.aborted:
                return []
