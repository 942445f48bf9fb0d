"""The loop that decodes one batch: samples a token for every row, detects ends, joins the results of turns."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from trimtab.trainer.engines.decoding_rows import DecodingRow, append_sampled, mark_aborted
from trimtab.trainer.engines.embedded.decoder import Decoder
from trimtab.trainer.engines.embedded.expert_recorder import ExpertRecorder
from trimtab.trainer.engines.embedded.invariant_decoder import with_trainer_logps
from trimtab.trainer.engines.embedded.sampling import SampledTokens, sample_tokens
from trimtab.trainer.engines.stopping import StopChecker
from trimtab.trainer.engines.turn_exchange import TurnExchange
from trimtab.trainer.models.matmul import on_accelerator
from trimtab.types import AbortSignal, SamplingParams

# Finished rows are removed once they exceed this share of the batch. On a CPU any share up to a quarter takes the same
# time on responses of mixed length; never removing rows takes 2.6 times as long. A GPU hardly takes longer for more
# rows, and needs another graph for fewer.
COMPACT_SHARE, COMPACT_SHARE_ON_ACCELERATOR = 1 / 16, 1 / 2


@dataclass(slots=True, eq=False)
class DecodingLoop:
    """Decodes rows in lockstep until each is complete, or all are aborted.

    Attributes:
        rows: in the order of the decoder's batch; those that are complete are removed from time to time.
        version: policy version of the weights.
        exchange: the turns of multi-turn responses. A row that waits for a result is not decoded.
        invariant: log-probs are those of the trainer's head.
        decoded: tokens run through the model so far.
    """

    decoder: Decoder
    rows: list[DecodingRow]
    sampling: SamplingParams
    stop: StopChecker
    version: int
    exchange: TurnExchange | None = None
    abort: AbortSignal | None = None
    recorder: ExpertRecorder | None = None
    invariant: bool = False
    decoded: int = field(default=0, init=False)

    def run(self) -> None:
        logits = self.decoder.first
        while True:
            sampled = self._sample(logits)
            decoded = [i for i, row in enumerate(self.rows) if row.active]
            append_sampled(self.rows, decoded, sampled)
            self._detect_ends([self.rows[i] for i in decoded])
            if self.exchange is not None:
                self.exchange.join(self.sampling.max_tokens, idle=not any(row.active for row in self.rows))
            if all(row.complete for row in self.rows):
                return
            if self.abort is not None and self.abort.is_set():
                mark_aborted(row for row in self.rows if not row.complete)
                return
            logits = self._step(self._remove_finished(sampled.ids))

    def _sample(self, logits: Tensor) -> SampledTokens:
        last = self.sampling.max_tokens - 1
        uniform = [row.uniform_draws[min(len(row.ids), last)] for row in self.rows]
        draws = torch.tensor(uniform, dtype=torch.float64, device=logits.device)
        sampled = sample_tokens(logits, draws, self.sampling)
        return with_trainer_logps(sampled, logits, self.sampling.temperature) if self.invariant else sampled

    def _detect_ends(self, rows: list[DecodingRow]) -> None:
        """Completes the rows whose last token ends them, and submits the turns that it ends."""
        max_turn_tokens = None if self.exchange is None else self.exchange.max_turn_tokens
        rows = [row for row in rows if row.sampled[-1]]  # a stop in an observation ends nothing
        for row, ended in zip(rows, self.stop.ended([row.turn_ids for row in rows]), strict=True):
            if ended and self.exchange is not None:
                self.exchange.submit(row, row.completion(self.version, self.stop))
            elif ended:
                row.finish, row.complete = "stop", True
            else:
                row.complete = row.is_full(self.sampling.max_tokens, max_turn_tokens)

    def _remove_finished(self, tokens: Tensor) -> Tensor:
        """Removes complete rows if they are many; returns the token that every remaining row is to run."""
        index = [i for i, row in enumerate(self.rows) if not row.complete]
        share = COMPACT_SHARE_ON_ACCELERATOR if on_accelerator(tokens.device) else COMPACT_SHARE
        if len(self.rows) - len(index) > share * len(self.rows):
            kept = torch.tensor(index, device=tokens.device)
            self.decoder.keep(kept)
            self.rows, tokens = [self.rows[i] for i in index], tokens[kept]
        if self.exchange is not None:  # rows whose turn has just ended run its last token later
            tokens = torch.tensor([row.ids[-1] for row in self.rows], device=tokens.device)
        return tokens

    def _step(self, tokens: Tensor) -> Tensor:
        waiting = [i for i, row in enumerate(self.rows) if row.waiting]
        paused = torch.tensor(waiting, device=tokens.device) if waiting else None
        logits = self.decoder.step(tokens, paused)
        active = [row.active for row in self.rows]
        if self.recorder is not None:
            self.recorder.step(self.rows, active)
        self.decoded += active.count(True)
        return logits
