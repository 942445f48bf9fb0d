"""One batch to optimizer updates: proximal and reference log-probs, the objective, and a guard around every step."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from trimtab.config import Config
from trimtab.errors import TrimtabError
from trimtab.models.logprobs import TokenScores, score
from trimtab.objectives import Objective, PolicyLogps, mismatch
from trimtab.training.batching import MicroBatch
from trimtab.training.optim import learning_rate, set_learning_rate

MiniBatch = list[MicroBatch]


@dataclass
class UpdateStats:
    """Mergeable statistics of one batch; floats are made once, at the end of the step."""

    objective: Any = None
    mismatch: Any = None
    anchors: dict[int, np.ndarray] = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)
    grad_norms: list[float] = field(default_factory=list)
    skipped: int = 0
    tokens: int = 0
    lr: float = 0.0


@dataclass
class Learner:
    """The trained model with its optimizer. `updates` counts completed optimizer updates: the clock of the run."""

    config: Config
    model: nn.Module
    optimizer: torch.optim.Optimizer
    objective: Objective
    total_updates: int
    reference: nn.Module | None = None
    updates: int = 0
    bad_in_a_row: int = 0

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def proximal_is_current(self) -> bool:
        """With a single update per batch the proximal policy is the current one, detached: no forward is needed."""
        trainer = self.config.trainer
        return trainer.minibatches * trainer.epochs == 1 and "proximal" not in self.objective.prepare_needs

    @torch.no_grad()
    def score_constants(self, batches: Sequence[MiniBatch]) -> list[MiniBatch]:
        """Add the log-probs that stay fixed during the batch, where the objective reads them."""
        need_proximal = "proximal" in self.objective.needs and not self.proximal_is_current
        readers = {"proximal": self.model if need_proximal else None, "reference": self.reference}
        models = {name: model for name, model in readers.items() if model is not None}
        return [
            [
                micro.with_scores(**{name: self._score(model, micro).logp for name, model in models.items()})
                for micro in batch
            ]
            for batch in batches
        ]

    def update(self, batches: Sequence[MiniBatch], on_progress: Callable[[int, int], None]) -> UpdateStats:
        """All epochs over one batch, one optimizer update for each mini-batch."""
        stats, version = UpdateStats(), self.updates
        epochs = self.config.trainer.epochs
        for epoch in range(epochs):
            for index, batch in enumerate(batches):
                has_proximal = batch[0].proximal is not None
                self._one_update(batch, stats, version, measure=epoch == 0 and (index == 0 or has_proximal))
                on_progress(epoch * len(batches) + index + 1, epochs * len(batches))
        return stats

    def _one_update(self, batch: MiniBatch, stats: UpdateStats, version: int, *, measure: bool) -> None:
        """`version` is that of the batch's start; `measure`: whether these rows still show the mismatch alone."""
        state = self._prepare(batch)
        loss_sum = 0.0
        for micro in batch:
            scores = self._score(self.model, micro)
            logps = self._logps(micro, scores)
            out = self.objective(logps, micro.advantage, state=state)
            out.loss.backward()
            loss_sum += float(out.loss.detach())
            stats.objective = out.metrics if stats.objective is None else stats.objective + out.metrics
            if measure:
                measured = mismatch(self._anchor(micro, scores), micro.behavior, micro.mask)
                stats.mismatch = measured if stats.mismatch is None else stats.mismatch + measured
            self._remember(micro, scores, stats, version)
            stats.tokens += int(micro.tokens.response_mask.sum())
        self._guarded_step(loss_sum, stats)

    def _guarded_step(self, loss: float, stats: UpdateStats) -> None:
        """Step the optimizer unless the loss or the gradient is not finite; then skip, count, and in the end stop."""
        stats.lr = learning_rate(self.config.optim, self.updates, self.total_updates)
        set_learning_rate(self.optimizer, stats.lr)
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, self.config.optim.grad_clip))
        if math.isfinite(loss) and math.isfinite(norm):
            self.optimizer.step()
            # A finite step can still overflow the weights; nothing that follows could be trusted or saved.
            if not bool(torch.stack([p.detach().sum() for p in parameters]).isfinite().all()):
                raise DivergedError("an update made the weights non-finite", weights_are_good=False)
            self.updates += 1
            self.bad_in_a_row = 0
            stats.grad_norms.append(norm)
        else:
            self.bad_in_a_row += 1
            stats.skipped += 1
        self.optimizer.zero_grad(set_to_none=True)
        if self.bad_in_a_row >= self.config.trainer.max_bad_steps:
            raise DivergedError(
                f"{self.bad_in_a_row} updates in a row were not finite (loss {loss:.4g}, gradient norm {norm:.4g})",
                weights_are_good=True,
            )

    def _prepare(self, batch: MiniBatch) -> Any:
        """What the objective must know of the whole update before its first micro-batch."""
        needs_current = "current" in self.objective.prepare_needs
        state = None
        for micro in batch:
            with torch.no_grad():
                scores = self._score(self.model, micro) if needs_current else None
            part = self.objective.prepare(self._logps(micro, scores), micro.advantage)
            state = part if state is None else state + part
        return state

    def _logps(self, micro: MicroBatch, scores: TokenScores | None) -> PolicyLogps:
        current = scores.logp if scores is not None else None
        proximal = micro.proximal
        if proximal is None and current is not None and "proximal" in self.objective.needs:
            proximal = current.detach()
        return PolicyLogps(
            current=current,
            behavior=micro.behavior,
            mask=micro.mask,
            proximal=proximal,
            reference=micro.reference,
            entropy=scores.entropy if scores is not None else None,
        )

    def _anchor(self, micro: MicroBatch, scores: TokenScores) -> torch.Tensor:
        return micro.proximal if micro.proximal is not None else scores.logp.detach()

    def _remember(self, micro: MicroBatch, scores: TokenScores, stats: UpdateStats, version: int) -> None:
        """Keep the first look at every row for the trajectory file; later epochs see a policy that has moved on."""
        for index, row in enumerate(micro.rows):
            if row not in stats.anchors:
                real = micro.tokens.response_mask[index]
                stats.anchors[row] = self._anchor(micro, scores)[index][real].cpu().numpy()
                # Without a proximal pass the first look at a later mini-batch is at a policy some updates older.
                stats.versions[row] = version if micro.proximal is not None else self.updates

    @property
    def anchor_name(self) -> str:
        """Which trainer log-probs the mismatch metrics compare the sampler with."""
        return "proximal" if "proximal" in self.objective.needs else "current"

    def _score(self, model: nn.Module, micro: MicroBatch) -> TokenScores:
        with self._precision():
            return score(
                model,
                micro.tokens,
                temperature=self.config.sampling.temperature,
                entropy="entropy" in self.objective.needs,
                kept=micro.kept,
            )

    @contextlib.contextmanager
    def _precision(self) -> Iterator[None]:
        if self.config.model.autocast == "none":
            yield
            return
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            yield


class DivergedError(TrimtabError):
    """Training cannot go on; the loop adds where the last good checkpoint lies.

    `weights_are_good`: skipped updates left the weights as they were, so they can still be saved.
    """

    def __init__(self, line: str, *, weights_are_good: bool) -> None:
        super().__init__(line)
        self.weights_are_good = weights_are_good
