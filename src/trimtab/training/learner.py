"""Turns one batch into optimizer updates: proximal and reference log-probs, the objective, guarded steps."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from trimtab.config import Config
from trimtab.errors import DivergedError
from trimtab.models.logprobs import TokenScores, score
from trimtab.models.perturbation import LARGEST, Perturbation, PerturbationCoverage
from trimtab.models.routing import RouterInfo, Routes, agreement
from trimtab.models.sharding import local
from trimtab.objectives import Objective, PolicyLogps, mismatch
from trimtab.seeds import derive
from trimtab.training.assignment import assigned_micro_batches
from trimtab.training.batching import MicroBatch
from trimtab.training.optim import clip_gradient, learning_rate, set_learning_rate
from trimtab.training.ranks import Ranks, here
from trimtab.training.step_statistics import StepStatistics, all_gather_tensors, all_reduce_statistics, without_counts

MiniBatch = list[MicroBatch]
ADVICE = "lower optim.lr or choose a stricter correction"


@dataclass
class Learner:
    """The trained model with its optimizer. `updates` counts completed optimizer updates: the clock of the run.

    With a `perturbation` every forward that carries gradient is noisy; the clean policy is looked at in probes only.
    `bounds`: those found at step 0, under `objective.calibrate`. `experts`: the model's, where routing is replayed.
    """

    config: Config
    model: nn.Module
    optimizer: torch.optim.Optimizer
    objective: Objective
    total_updates: int
    reference: nn.Module | None = None
    perturbation: Perturbation | None = None
    updates: int = 0
    bad_in_a_row: int = 0
    bounds: dict[str, float] | None = None
    ranks: Ranks = field(default_factory=here)
    share: float = 1.0  # of the scheduled learning rate, the same for all updates of a step
    experts: RouterInfo | None = None

    @property
    def device(self) -> torch.device:
        return self.ranks.device or next(self.model.parameters()).device

    @property
    def trained(self) -> nn.Module:
        """One module that holds every trained parameter under its name."""
        if self.perturbation is None:
            return self.model
        return nn.ModuleDict({"model": self.model, "perturbation": self.perturbation})

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
        return [self._scored(batch, models) for batch in batches] if models else [list(batch) for batch in batches]

    def _scored(self, batch: MiniBatch, models: Mapping[str, nn.Module]) -> MiniBatch:
        """`batch` with the log-probs of `models`, each micro-batch scored by one rank and known to all."""
        scores: list[tuple[int, dict[str, torch.Tensor]]] = []
        routed: dict[int, MicroBatch] = {}  # of this rank, which will train on the same micro-batches
        for index, micro in assigned_micro_batches(batch, self.ranks):
            looked = {name: self._constant(name, model, micro) for name, model in models.items()}
            scores.append((index, {name: found.logp for name, found in looked.items()}))
            if micro.rows and (own := looked["proximal"].routes if "proximal" in looked else None) is not None:
                routed[index] = self._settled(micro, own)
        if self.ranks.size > 1:
            mine = {f"{index}|{name}": logp for index, found in scores for name, logp in found.items()}
            theirs = all_gather_tensors({place: logp for place, logp in mine.items() if len(logp)}, self.ranks)
            scores = [
                (index, {name: theirs[f"{index}|{name}"].to(self.device) for name in models})
                for index in range(len(batch))
            ]
        return [routed.get(index, batch[index]).with_scores(**found) for index, found in scores]

    def _constant(self, name: str, model: nn.Module, micro: MicroBatch) -> TokenScores:
        """The reference routes freely; the proximal pass as the current one will."""
        if name == "proximal":
            return self._score(model, micro, routes=micro.routes, record=self.experts is not None)
        return self._score(model, micro)

    def _settled(self, micro: MicroBatch, own: Routes) -> MicroBatch:
        """What the update replays is settled with the proximal pass, whose routers' own choice is `own`."""
        if micro.routes is None:
            return micro.with_scores(routes=own)
        return micro.with_scores(agreed=agreement(own, micro.routes))

    @torch.no_grad()
    def logp(self, micro: MicroBatch) -> torch.Tensor:
        """Log-probs (rows, time) under the current policy, without noise."""
        return self._score(self.model, micro, routes=micro.routes).logp

    def update(
        self, batches: Sequence[MiniBatch], on_progress: Callable[[int, int], None], *, probe: bool = True
    ) -> StepStatistics:
        """All epochs over one batch, one optimizer update for each mini-batch.

        `probe`: whether a perturbed policy is also scored clean, once for each row (others are clean anyway).
        """
        watched = self.perturbation is not None and probe
        stats, version = StepStatistics(changes=PerturbationCoverage() if watched else None), self.updates
        epochs = self.config.trainer.epochs
        for epoch in range(epochs):
            for index, batch in enumerate(batches):
                has_proximal = batch[0].proximal is not None
                measure = epoch == 0 and (index == 0 or has_proximal)
                self._one_update(batch, stats, version, first=epoch == 0, measure=measure)
                on_progress(epoch * len(batches) + index + 1, epochs * len(batches))
        if self.ranks.size > 1:
            all_reduce_statistics(stats, self.ranks)
        return stats

    def _one_update(self, batch: MiniBatch, stats: StepStatistics, version: int, *, first: bool, measure: bool) -> None:
        """`version` is that of the batch's start; `first`: whether these rows are seen for the first time; `measure`:
        whether they still show the mismatch alone."""
        mine = list(assigned_micro_batches(batch, self.ranks))
        stats.turns += len(mine) * self.ranks.size
        stats.idle += len(mine) * self.ranks.size - len(batch)
        state = self._prepare(mine)
        loss_sum = 0.0
        for index, micro in mine:
            # All rows of a mini-batch are new or none is: ranks must agree on every forward.
            clean = self.logp(micro) if first and stats.changes is not None else None
            watched = micro.agreed is None and (measure or self.config.routing.replay == "proximal")
            scores = self._current(micro, index, stats.changes if micro.rows else None, record=watched)
            self._count_routes(micro, scores, stats, first=first)
            out = self.objective(self._logps(micro, scores), micro.advantage, state=state)
            (out.loss if micro.rows else scores.logp.sum()).backward()
            loss_sum += float(out.loss.detach()) if micro.rows else 0.0
            seen = out.metrics if micro.rows else without_counts(out.metrics)
            stats.objective = seen if stats.objective is None else stats.objective + seen
            anchor = self._anchor(micro, scores, clean)
            if anchor is not None:
                if measure:
                    measured = mismatch(anchor, micro.behavior, micro.on_policy)
                    measured = measured if micro.rows else without_counts(measured)
                    stats.mismatch = measured if stats.mismatch is None else stats.mismatch + measured
                self._remember(micro, anchor, None if clean is None else scores.logp.detach(), stats, version)
            stats.tokens += int(micro.tokens.response_mask.sum()) if micro.rows else 0
        self._guarded_step(loss_sum, stats)

    def _current(
        self, micro: MicroBatch, index: int, changes: PerturbationCoverage | None = None, *, record: bool = False
    ) -> TokenScores:
        """The trained policy on one micro-batch. The noise is a function of (run, update, micro-batch), so that
        `prepare`, gradient checkpointing and a resumed run see the same."""
        if self.experts is not None and micro.rows and micro.routes is None:
            raise ValueError(f"no experts to replay for the micro-batch of rows {micro.rows}")
        record = record and self.experts is not None
        if self.perturbation is None:
            return self._score(self.model, micro, routes=micro.routes, record=record)
        seed = derive(self.config.seed, "noise", self.updates, index)
        with self.perturbation.attached(seed=seed, watch=changes):
            return self._score(self.model, micro, routes=micro.routes, record=record)

    def _count_routes(self, micro: MicroBatch, scores: TokenScores, stats: StepStatistics, *, first: bool) -> None:
        """Experts of the rollout are compared at the first look at a batch, those of the proximal pass in every one."""
        found = micro.agreed if first else None
        if scores.routes is not None and micro.routes is not None:
            found = agreement(scores.routes, micro.routes)
        if found is not None:
            stats.agreed, stats.routed = stats.agreed + found[0], stats.routed + found[1]

    def _guarded_step(self, loss: float, stats: StepStatistics) -> None:
        """Step the optimizer unless the loss or a gradient is not finite; then skip, count, and in the end stop."""
        stats.lr = self.share * learning_rate(self.config.optim, self.updates, self.total_updates)
        set_learning_rate(self.optimizer, stats.lr)
        # The first group is the policy's. The noise has one of its own: its gradient must not scale the policy's, and a
        # log sigma of -inf is how a layer without noise is written.
        parameters = self.optimizer.param_groups[0]["params"]
        noise = None if self.perturbation is None else self.perturbation.log_sigma.grad
        if noise is not None:
            self.ranks.add_up(noise)  # the one parameter that FSDP does not hold
        loss, norm = self.ranks.total(loss), clip_gradient(parameters, self.config.optim.grad_clip, self.ranks)
        steady = noise is None or bool(noise.isfinite().all())
        if math.isfinite(loss) and math.isfinite(norm) and steady:
            self.optimizer.step()
            self._check_weights(parameters)
            self.updates += 1
            self.bad_in_a_row = 0
            stats.grad_norms.append(norm)
        else:
            self.bad_in_a_row += 1
            stats.skipped += 1
        self.optimizer.zero_grad(set_to_none=True)
        if self.bad_in_a_row >= self.config.trainer.max_bad_steps:
            part = f"loss {loss:.4g}, gradient norm {norm:.4g}" + (
                "" if steady else ", that of the perturbation as well"
            )
            raise NonFiniteUpdateError(
                f"{self.bad_in_a_row} updates in a row were not finite ({part})", weights_are_good=True
            )

    def _check_weights(self, parameters: Sequence[torch.Tensor]) -> None:
        """A finite step can still overflow weights or noise; nothing that follows could be trusted or saved."""
        finite = torch.stack([local(p).detach().sum() for p in parameters]).isfinite().all()
        if self.ranks.total(float(~finite)):
            raise NonFiniteUpdateError("an update made the weights non-finite", weights_are_good=False)
        if self.perturbation is not None and self.perturbation.diverged:
            raise NonFiniteUpdateError(
                f"an update made the perturbation's standard deviation larger than {LARGEST:g}",
                weights_are_good=False,
                advice="lower perturbation.lr",
            )

    def _prepare(self, mine: Sequence[tuple[int, MicroBatch]]) -> Any:
        """What the objective must know of the whole update before its first micro-batch."""
        needs_current = "current" in self.objective.prepare_needs
        state = None
        for index, micro in mine:
            with torch.no_grad():
                scores = self._current(micro, index) if needs_current else None
            part = self.objective.prepare(self._logps(micro, scores), micro.advantage)
            state = part if state is None else state + part
        return state.all_reduce() if state is not None and self.ranks.size > 1 else state

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
            off_policy=micro.off_policy if "off_policy" in self.objective.needs else None,
        )

    def _anchor(self, micro: MicroBatch, scores: TokenScores, clean: torch.Tensor | None) -> torch.Tensor | None:
        """What the sampler is compared with; None where only the perturbed policy was looked at."""
        if micro.proximal is not None:
            return micro.proximal
        return clean if self.perturbation is not None else scores.logp.detach()

    def _remember(
        self,
        micro: MicroBatch,
        anchor: torch.Tensor,
        perturbed: torch.Tensor | None,
        stats: StepStatistics,
        version: int,
    ) -> None:
        """Keep the first look at every row for the trajectory file; later epochs see a policy that has moved on."""
        for index, row in enumerate(micro.rows):
            if row not in stats.anchors:
                real = micro.tokens.response_mask[index]
                stats.anchors[row] = anchor[index][real].cpu().numpy()
                if perturbed is not None:
                    stats.perturbed[row] = perturbed[index][real].cpu().numpy()
                # Without a proximal pass the first look at a later mini-batch is at a policy some updates older.
                stats.versions[row] = version if micro.proximal is not None else self.updates

    @property
    def anchor_name(self) -> str:
        """Which trainer log-probs the mismatch metrics compare the sampler with."""
        return "proximal" if "proximal" in self.objective.needs else "current"

    def _score(
        self, model: nn.Module, micro: MicroBatch, *, routes: Routes | None = None, record: bool = False
    ) -> TokenScores:
        with self._precision():
            scores = score(
                model,
                micro.tokens,
                temperature=self.config.sampling.temperature,
                entropy="entropy" in self.objective.needs,
                kept=micro.kept,
                routes=routes,
                record=record and bool(micro.rows),
            )
        if micro.rows:
            own = scores.routes
            return scores if own is None else scores._replace(routes=Routes(*(part.cpu() for part in own)))
        return TokenScores(scores.logp[:0], None if scores.entropy is None else scores.entropy[:0])

    @contextlib.contextmanager
    def _precision(self) -> Iterator[None]:
        if self.config.model.autocast == "none":
            yield
            return
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            yield


class NonFiniteUpdateError(DivergedError):
    """Training cannot go on; the loop adds where the last good checkpoint lies.

    `weights_are_good`: skipped updates left the weights as they were, so they can still be saved.
    """

    def __init__(self, line: str, *, weights_are_good: bool, advice: str = ADVICE) -> None:
        super().__init__(line)
        self.weights_are_good = weights_are_good
        self.advice = advice
