"""Trains the policy on one batch.

1. `score_fixed_policies`   log-probs of the proximal and the reference policy, if the objective reads them
2. `update`                 for each epoch and mini-batch: prepare the objective, accumulate the gradient over
                            micro-batches, clip it, and step the optimizer if loss and gradient are finite
"""

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
from trimtab.models.perturbation import MAX_STD, Perturbation, PerturbationCoverage
from trimtab.models.routing import RouterInfo, Routes, routing_agreement
from trimtab.models.sharding import local_shard
from trimtab.objectives import Objective, PolicyLogps, mismatch
from trimtab.seeds import derive
from trimtab.training.assignment import assigned_micro_batches
from trimtab.training.batching import MicroBatch
from trimtab.training.optim import clip_gradient, learning_rate, set_learning_rate
from trimtab.training.ranks import Ranks, current_ranks
from trimtab.training.step_statistics import StepStatistics, all_gather_tensors, all_reduce_statistics, without_counts

MiniBatch = list[MicroBatch]
ADVICE = "lower optim.lr or choose a stricter correction"


@dataclass
class Learner:
    """The trained model with its objective and optimizer. `updates` counts completed optimizer updates.

    With a `perturbation` every forward that carries a gradient is perturbed; the clean policy is scored in probes only.
    `bounds` are the calibrated ones, if `objective.calibrate` is set. `experts` describes the routers of the model, if
    routing is replayed. `lr_factor` scales the scheduled learning rate of all updates of a step.
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
    ranks: Ranks = field(default_factory=current_ranks)
    lr_factor: float = 1.0
    experts: RouterInfo | None = None

    @property
    def device(self) -> torch.device:
        return self.ranks.device or next(self.model.parameters()).device

    @property
    def trained(self) -> nn.Module:
        """A module that holds every trained parameter under the name it has in checkpoints."""
        if self.perturbation is None:
            return self.model
        return nn.ModuleDict({"model": self.model, "perturbation": self.perturbation})

    @property
    def proximal_is_current(self) -> bool:
        """Whether the proximal policy is the detached current one, so that it needs no forward of its own.

        That is the case with a single update per batch.
        """
        trainer = self.config.trainer
        return trainer.minibatches * trainer.epochs == 1 and "proximal" not in self.objective.prepare_needs

    @torch.no_grad()
    def score_fixed_policies(self, batches: Sequence[MiniBatch]) -> list[MiniBatch]:
        """Return `batches` with log-probs of the proximal and the reference policy, if the objective reads them."""
        need_proximal = "proximal" in self.objective.needs and not self.proximal_is_current
        policies = {"proximal": self.model if need_proximal else None, "reference": self.reference}
        models = {name: model for name, model in policies.items() if model is not None}
        return [self._scored(batch, models) for batch in batches] if models else [list(batch) for batch in batches]

    def _scored(self, batch: MiniBatch, models: Mapping[str, nn.Module]) -> MiniBatch:
        """`batch` with the log-probs of `models`. Each micro-batch is scored by one rank and sent to all."""
        logps: list[tuple[int, dict[str, torch.Tensor]]] = []
        routed: dict[int, MicroBatch] = {}  # this rank's only: it trains on the micro-batches that it scores here
        for index, micro in assigned_micro_batches(batch, self.ranks):
            scores = {name: self._score_fixed(name, model, micro) for name, model in models.items()}
            logps.append((index, {name: policy_scores.logp for name, policy_scores in scores.items()}))
            routes = scores["proximal"].routes if "proximal" in scores else None
            if micro.rows and routes is not None:
                routed[index] = self._attach_routing(micro, routes)
        if self.ranks.size > 1:
            local_logps = {f"{index}|{name}": logp for index, by_name in logps for name, logp in by_name.items()}
            gathered = all_gather_tensors({key: logp for key, logp in local_logps.items() if len(logp)}, self.ranks)
            logps = [
                (index, {name: gathered[f"{index}|{name}"].to(self.device) for name in models})
                for index in range(len(batch))
            ]
        return [routed.get(index, batch[index]).with_scores(**by_name) for index, by_name in logps]

    def _score_fixed(self, name: str, model: nn.Module, micro: MicroBatch) -> TokenScores:
        """Scores of the proximal policy, with replayed routing like the current one, or of the reference, without."""
        if name == "proximal":
            return self._score(model, micro, routes=micro.routes, record=self.experts is not None)
        return self._score(model, micro)

    def _attach_routing(self, micro: MicroBatch, chosen: Routes) -> MicroBatch:
        """Attach `chosen`, the experts that the routers chose in the proximal pass, for replay in the update.

        Where the engine's routed experts are replayed, only their agreement with `chosen` is attached.
        """
        if micro.routes is None:
            return micro.with_scores(routes=chosen)
        return micro.with_scores(agreed=routing_agreement(chosen, micro.routes))

    @torch.no_grad()
    def logp(self, micro: MicroBatch) -> torch.Tensor:
        """Log-probs (rows, time) of the current policy, without perturbation."""
        return self._score(self.model, micro, routes=micro.routes).logp

    def update(
        self, batches: Sequence[MiniBatch], on_progress: Callable[[int, int], None], *, probe: bool = True
    ) -> StepStatistics:
        """Train on one batch: `trainer.epochs` epochs, one optimizer update for each mini-batch.

        Args:
            batches: the mini-batches, with advantages and the log-probs of the fixed policies.
            on_progress: called after each update with the number of updates done and their total.
            probe: whether to score every row once without perturbation too, if the policy is perturbed.

        Raises:
            NonFiniteUpdateError: `trainer.max_bad_steps` updates in a row were not finite, or weights are not.
        """
        coverage = PerturbationCoverage() if self.perturbation is not None and probe else None
        stats, version = StepStatistics(changes=coverage), self.updates
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
        """One optimizer update on the mini-batch `batch`.

        Args:
            version: number of updates when the batch was taken.
            first: whether this is the first epoch.
            measure: whether the log-probs still measure the mismatch between sampler and trainer, and not the effect
                of earlier updates.
        """
        assigned = list(assigned_micro_batches(batch, self.ranks))
        stats.turns += len(assigned) * self.ranks.size
        stats.idle += len(assigned) * self.ranks.size - len(batch)
        state = self._prepare(assigned)
        loss_sum = 0.0
        for index, micro in assigned:
            # The same condition on every rank: sharded ranks must run the same number of forwards.
            clean = self.logp(micro) if first and stats.changes is not None else None
            record = micro.agreed is None and (measure or self.config.routing.replay == "proximal")
            scores = self._current(micro, index, stats.changes if micro.rows else None, record=record)
            self._count_routes(micro, scores, stats, first=first)
            out = self.objective(self._logps(micro, scores), micro.advantage, state=state)
            (out.loss if micro.rows else scores.logp.sum()).backward()
            loss_sum += float(out.loss.detach()) if micro.rows else 0.0
            metrics = out.metrics if micro.rows else without_counts(out.metrics)
            stats.objective = metrics if stats.objective is None else stats.objective + metrics
            logps = self._mismatch_logps(micro, scores, clean)
            if logps is not None:
                if measure:
                    measured = mismatch(logps, micro.behavior, micro.on_policy)
                    measured = measured if micro.rows else without_counts(measured)
                    stats.mismatch = measured if stats.mismatch is None else stats.mismatch + measured
                self._keep_first_logps(micro, logps, None if clean is None else scores.logp.detach(), stats, version)
            stats.tokens += int(micro.tokens.response_mask.sum()) if micro.rows else 0
        self._guarded_step(loss_sum, stats)

    def _current(
        self, micro: MicroBatch, index: int, changes: PerturbationCoverage | None = None, *, record: bool = False
    ) -> TokenScores:
        """Scores of the trained policy, perturbed if the recipe says so.

        The noise is a function of run, update and micro-batch, so that `prepare`, gradient checkpointing and a resumed
        run draw the same.
        """
        if self.experts is not None and micro.rows and micro.routes is None:
            raise ValueError(f"no experts to replay for the micro-batch of rows {micro.rows}")
        record = record and self.experts is not None
        if self.perturbation is None:
            return self._score(self.model, micro, routes=micro.routes, record=record)
        seed = derive(self.config.seed, "noise", self.updates, index)
        with self.perturbation.attached(seed=seed, watch=changes):
            return self._score(self.model, micro, routes=micro.routes, record=record)

    def _count_routes(self, micro: MicroBatch, scores: TokenScores, stats: StepStatistics, *, first: bool) -> None:
        """Count how often the routers would have chosen the experts that were replayed.

        The engine's experts are compared in the first epoch only, those of the proximal pass in every epoch.
        """
        counts = micro.agreed if first else None
        if scores.routes is not None and micro.routes is not None:
            counts = routing_agreement(scores.routes, micro.routes)
        if counts is not None:
            stats.agreed, stats.routed = stats.agreed + counts[0], stats.routed + counts[1]

    def _guarded_step(self, loss: float, stats: StepStatistics) -> None:
        """Step the optimizer, or skip the update if the loss or a gradient is not finite.

        Raises `NonFiniteUpdateError` after `trainer.max_bad_steps` skipped updates in a row.
        """
        stats.lr = self.lr_factor * learning_rate(self.config.optim, self.updates, self.total_updates)
        set_learning_rate(self.optimizer, stats.lr)
        # Group 0 holds the policy. The noise has a group of its own, outside of clipping and of the check for finite
        # weights: its gradient must not scale the policy's, and log sigma is -inf for a layer without noise.
        parameters = self.optimizer.param_groups[0]["params"]
        noise = None if self.perturbation is None else self.perturbation.log_sigma.grad
        if noise is not None:
            self.ranks.all_reduce_(noise)  # the only parameter that is not under FSDP
        loss, norm = self.ranks.all_reduce_sum(loss), clip_gradient(parameters, self.config.optim.grad_clip, self.ranks)
        noise_is_finite = noise is None or bool(noise.isfinite().all())
        if math.isfinite(loss) and math.isfinite(norm) and noise_is_finite:
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
            values = f"loss {loss:.4g}, gradient norm {norm:.4g}"
            values += "" if noise_is_finite else ", that of the perturbation as well"
            raise NonFiniteUpdateError(
                f"{self.bad_in_a_row} updates in a row were not finite ({values})", weights_are_good=True
            )

    def _check_weights(self, parameters: Sequence[torch.Tensor]) -> None:
        """Raise `NonFiniteUpdateError` if a finite gradient made weights or noise overflow: they must not be saved."""
        finite = torch.stack([local_shard(p).detach().sum() for p in parameters]).isfinite().all()
        if self.ranks.all_reduce_sum(float(~finite)):
            raise NonFiniteUpdateError("an update made the weights non-finite", weights_are_good=False)
        if self.perturbation is not None and self.perturbation.diverged:
            raise NonFiniteUpdateError(
                f"an update made the perturbation's standard deviation larger than {MAX_STD:g}",
                weights_are_good=False,
                advice="lower perturbation.lr",
            )

    def _prepare(self, assigned: Sequence[tuple[int, MicroBatch]]) -> Any:
        """The objective's state of the whole update, such as denominators, over all micro-batches and ranks."""
        needs_current = "current" in self.objective.prepare_needs
        state = None
        for index, micro in assigned:
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

    def _mismatch_logps(
        self, micro: MicroBatch, scores: TokenScores, clean: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Log-probs to compare the sampler's with; None if only the perturbed policy was scored."""
        if micro.proximal is not None:
            return micro.proximal
        return clean if self.perturbation is not None else scores.logp.detach()

    def _keep_first_logps(
        self,
        micro: MicroBatch,
        logps: torch.Tensor,
        perturbed: torch.Tensor | None,
        stats: StepStatistics,
        version: int,
    ) -> None:
        """Keep each row's log-probs of the first epoch for the trajectory file; later ones follow further updates."""
        for index, row in enumerate(micro.rows):
            if row not in stats.mismatch_logps:
                real = micro.tokens.response_mask[index]
                stats.mismatch_logps[row] = logps[index][real].cpu().numpy()
                if perturbed is not None:
                    stats.perturbed[row] = perturbed[index][real].cpu().numpy()
                # Without a proximal pass the log-probs of a later mini-batch follow the updates on earlier ones.
                stats.versions[row] = version if micro.proximal is not None else self.updates

    @property
    def mismatch_policy(self) -> str:
        """The policy whose log-probs the mismatch metrics compare with the sampler's: "proximal" or "current"."""
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
            routes = scores.routes
            return scores if routes is None else scores._replace(routes=Routes(*(part.cpu() for part in routes)))
        return TokenScores(scores.logp[:0], None if scores.entropy is None else scores.entropy[:0])

    @contextlib.contextmanager
    def _precision(self) -> Iterator[None]:
        if self.config.model.autocast == "none":
            yield
            return
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            yield


class NonFiniteUpdateError(DivergedError):
    """Loss, gradient or weights are not finite, and training cannot continue.

    `weights_are_good`: all bad updates were skipped, so the weights can still be saved. `advice`: what to change.
    """

    def __init__(self, message: str, *, weights_are_good: bool, advice: str = ADVICE) -> None:
        super().__init__(message)
        self.weights_are_good = weights_are_good
        self.advice = advice
