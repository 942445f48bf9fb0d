"""The responses of one generate call to inference servers: makes their requests and appends the results.

A response of several turns has a request for each turn, with all ids so far.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from trimtab.trainer.engines.decoding_rows import DecodingRow, mark_aborted
from trimtab.trainer.engines.server.request_dispatch import RequestDispatch
from trimtab.trainer.engines.server.server_protocol import CompletionRequest, CompletionResult
from trimtab.trainer.engines.stopping import StopChecker
from trimtab.trainer.engines.turn_exchange import POLL_INTERVAL
from trimtab.types import AbortSignal, Completion, Prompt, SamplingParams, TurnHandler


@dataclass(frozen=True, slots=True)
class CallResponses:
    """The responses of a call.

    Attributes:
        rows: all responses, prompt by prompt.
        version: policy version of the weights.
        stop_ids: the tokens that end a response or a turn.
        name: of the call, unique among those of all trainers.
    """

    rows: Sequence[DecodingRow]
    prompts: Sequence[Prompt]
    sampling: SamplingParams
    seed: int
    version: int
    stop: StopChecker
    stop_ids: tuple[int, ...]
    turns: TurnHandler | None
    name: str

    async def sample(self, dispatch: RequestDispatch, abort: AbortSignal | None) -> None:
        """Samples all responses; those that are not complete afterwards were aborted."""
        rows = [row for row in self.rows if not row.complete]
        await dispatch.run([self._respond(row, index, dispatch) for index, row in enumerate(rows)], abort)

    def completions(self) -> list[Completion]:
        """Returns all responses; those that are not complete were aborted."""
        mark_aborted(row for row in self.rows if not row.complete)
        return [replace(row.completion(self.version, self.stop), entropy=None) for row in self.rows]

    async def _respond(self, row: DecodingRow, index: int, dispatch: RequestDispatch) -> None:
        """Samples the rest of a response until it is complete or the call is aborted."""
        if self.turns is not None and row.turn_ids and self.stop.ended([row.turn_ids])[0]:
            await self._end_turn(row, dispatch)  # the turn had ended when an earlier call was aborted
        while not row.complete:
            result = await dispatch.ask(index, self._request(row))
            if result is None:
                return
            if self._append(row, result):
                await self._end_turn(row, dispatch)

    def _request(self, row: DecodingRow) -> CompletionRequest:
        """Returns the request that continues a response."""
        max_tokens = self.sampling.max_tokens - len(row.ids)
        if self.turns is not None:
            max_tokens = min(max_tokens, self.turns.max_turn_tokens - len(row.turn_ids))
        return CompletionRequest(
            name=f"{self.name}-{row.prompt}-{row.sample}-{len(row.ids)}",
            ids=(*self.prompts[row.prompt].ids.tolist(), *row.ids),
            max_tokens=max_tokens,
            seed=request_seed(self.seed, row.prompt, row.sample, len(row.ids)),
            sampling=self.sampling,
            stop_ids=self.stop_ids,
        )

    def _append(self, row: DecodingRow, result: CompletionResult) -> bool:
        """Appends new tokens up to the end of the response or turn; returns whether a stop ends it.

        Servers treat the tokens so far as part of the prompt and miss a stop string that begins in them, so stops are
        checked again.
        """
        begun = len(row.turn_ids)
        end = self.stop.end([*row.turn_ids, *result.ids], begun)
        new = len(result.ids) if end is None else end - begun
        for token, logp in zip(result.ids[:new], result.logp[:new], strict=True):
            # At temperature 0 the log-prob is 0 by definition, whatever a server reports.
            row.append(token, logp if self.sampling.temperature > 0 else 0.0, math.nan, None)
        if end is not None or result.finish == "stop":
            return True
        max_turn_tokens = None if self.turns is None else self.turns.max_turn_tokens
        row.complete = result.finish == "length" or row.is_full(self.sampling.max_tokens, max_turn_tokens)
        return False

    async def _end_turn(self, row: DecodingRow, dispatch: RequestDispatch) -> None:
        """Completes a response at the end of its turn, or appends what follows the turn once that is known."""
        if self.turns is None:
            row.finish, row.complete = "stop", True
            return
        finish = self.turns.submit(row.prompt, row.sample, row.completion(self.version, self.stop))
        if finish is not None:
            row.finish, row.complete = finish, True
            return
        while (result := self.turns.result(row.prompt, row.sample, 0.0)) is None:
            if dispatch.aborted:
                return
            await asyncio.sleep(POLL_INTERVAL)
        row.end_turn(result, self.sampling.max_tokens)
        row.append_observation(truncated=False)


def request_seed(seed: int, prompt: int, sample: int, length: int) -> int:
    """Returns the seed of one request.

    It depends on the length of the response so far, because a server uses the numbers of a seed from the first one on.
    """
    key = np.random.SeedSequence(entropy=seed, spawn_key=(prompt, sample, length))
    return int(key.generate_state(1, np.uint64)[0] >> np.uint64(1))
