"""Trains the policy on one batch.

1. `score_fixed_policies`   log-probs of the proximal and the reference policy, if the objective reads them
2. `update`                 for each epoch and mini-batch: prepare the objective, accumulate the gradient over
                            micro-batches, clip it, and step the optimizer if loss and gradient are finite

Optional methods take part through `features` (`features/feature.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from trimtab.objectives import Objective, PolicyLogps
from trimtab.trainer.config import DISTILLATION, TOKEN_BASELINE, Config
from trimtab.trainer.features.feature import Feature, ForwardPass, ProximalPass, Purpose
from trimtab.trainer.models.logprobs import TokenScores, score
from trimtab.trainer.models.matmul import reused_casts
from trimtab.trainer.models.sharding import named_weights
from trimtab.trainer.optim import (
    NonFiniteUpdateError,
    check_weights,
    clip_gradient,
    learning_rate,
    linear_decay,
    repeatable,
)
from trimtab.trainer.packing import MicroBatch, MiniBatch, assigned_micro_batches
from trimtab.trainer.ranks import RankGroup, current_ranks
from trimtab.trainer.rollout.source import RolloutSource
from trimtab.trainer.step_statistics import StepStatistics, add_metrics, all_gather_tensors, all_reduce_statistics


@dataclass
class Learner:
    """The trained model with its objective and optimizer."""

    config: Config
    model: nn.Module
    optimizer: torch.optim.Optimizer
    objective: Objective
    total_updates: int
    reference: nn.Module | None = None
    features: Sequence[Feature] = ()
    updates: int = 0  # completed optimizer updates
    bad_in_a_row: int = 0  # number of consecutive updates, up to the latest, that were not finite
    micro_batch_tokens: int | None = None  # None until the first batch, whose lengths "auto" reads
    lr_factor: float = 1.0  # multiplies the learning rate of the schedule
    decay_from: int | None = None  # update from which the rate also falls linearly, to 0 at the end of the run
    ranks: RankGroup = field(default_factory=current_ranks)

    @property
    def device(self) -> torch.device:
        return self.ranks.device or next(self.model.parameters()).device

    @property
    def modules(self) -> dict[str, nn.Module]:
        """Every trained module, by the name of its section in a checkpoint."""
        others = {name: trained.module for feature in self.features for name, trained in feature.modules().items()}
        return {"model": self.model, **others}

    @property
    def trained(self) -> nn.Module:
        """A module that holds every trained parameter under the name it has in checkpoints."""
        return nn.ModuleDict(self.modules) if len(self.modules) > 1 else self.model

    @property
    def token_baseline(self) -> bool:
        """Whether advantages have a baseline for each token, computed from the proximal policy."""
        return self.config.advantage.kind == TOKEN_BASELINE

    @property
    def distills(self) -> bool:
        """Whether advantages are log(reference / proximal): distillation, with the reference as teacher."""
        return self.config.advantage.kind == DISTILLATION

    @property
    def mismatch_policy(self) -> str:
        """The policy whose log-probs the mismatch metrics compare with the sampler's: "proximal" or "current"."""
        return "proximal" if "proximal" in self.objective.needs else "current"

    @torch.no_grad()
    def score_fixed_policies(self, batches: Sequence[MiniBatch]) -> list[MiniBatch]:
        """Returns `batches` with log-probs of proximal and reference policy, if objective or advantages read them.

        A baseline for each token also needs the proximal policy's `squares`; distillation needs its log-probs.
        """
        trainer, objective = self.config.trainer, self.objective
        # With a single update per batch the proximal policy is the detached current policy: no additional forward.
        one_update = trainer.updates_per_step == 1 and trainer.proximal == "current"
        is_current = one_update and "proximal" not in objective.prepare_needs
        models: dict[Purpose, nn.Module] = {}
        if self.token_baseline or self.distills or ("proximal" in objective.needs and not is_current):
            models["proximal"] = self.model
        if self.reference is not None:
            models["reference"] = self.reference
        return [self._score_batch(batch, models) for batch in batches] if models else [list(batch) for batch in batches]

    def _score_batch(self, batch: MiniBatch, models: Mapping[Purpose, nn.Module]) -> MiniBatch:
        """Returns `batch` with the log-probs of `models`. Each micro-batch is scored by one rank and sent to all."""
        assigned = dict(assigned_micro_batches(batch, self.ranks))
        logps: dict[int, dict[str, torch.Tensor]] = {index: {} for index in assigned}
        for name, model in models.items():
            features = self.features if name == "proximal" else ()
            passes = [one for feature in features for one in feature.proximal_passes(batch, self.updates)]
            for one in passes or [ProximalPass()]:
                with one.weights:
                    for index, micro in assigned.items():
                        assigned[index] = self._run_pass(model, ForwardPass(micro, name), one, logps[index])
        # Only micro-batches that this rank scored have features' extras; it trains on the same ones.
        scored = [assigned.get(index, micro) for index, micro in enumerate(batch)]
        if self.ranks.size > 1:
            own = {
                f"{index}|{name}": logp for index, named in logps.items() for name, logp in named.items() if len(logp)
            }
            logps = {index: {} for index in range(len(batch))}
            for key, logp in all_gather_tensors(own, self.ranks).items():
                index, _, name = key.partition("|")
                logps[int(index)][name] = logp.to(self.device)
        return [micro.with_scores(**logps[index]) for index, micro in enumerate(scored)]

    def _run_pass(
        self, model: nn.Module, call: ForwardPass, one: ProximalPass, logps: dict[str, torch.Tensor]
    ) -> MicroBatch:
        """Scores a micro-batch and adds the result to `logps`. Returns the micro-batch with what features add to it."""
        tokens = one.tokens(call.micro) if one.tokens is not None and call.micro.rows else None
        if tokens is not None and self.ranks.size == 1 and not tokens.any():
            return call.micro  # several ranks must run the same number of forwards
        scores, micro = self._score(model, call, squares=self.token_baseline and call.purpose == "proximal")
        for name, values in ((call.purpose, scores.logp), ("squares", scores.squares)):
            if values is not None:
                if tokens is not None and name in logps:
                    values = torch.where(tokens.to(self.device), values, logps[name])  # noqa: PLW2901
                logps[name] = values
        return micro

    def publish_to(self, source: RolloutSource) -> None:
        """Gives the engines of `source` the current weights."""
        options: dict[str, Any] = {}
        for feature in self.features:
            options |= feature.publish_options(self.model, self.updates)
        source.publish(named_weights(self.model), self.updates, **options)

    @torch.no_grad()
    def logp(self, micro: MicroBatch) -> torch.Tensor:
        """Returns the log-probs (rows, time) of the current policy, without perturbation."""
        return self._score(self.model, ForwardPass(micro, "probe"))[0].logp

    def update(
        self, batches: Sequence[MiniBatch], on_progress: Callable[[int, int], None], *, step: int = 1
    ) -> StepStatistics:
        """Trains on one batch: `trainer.epochs` epochs, one optimizer update for each mini-batch.

        batches: the mini-batches, with advantages and the log-probs of the fixed policies. on_progress: called after
        each update with the number of updates done and their total. step: the number of the step, from 1. Raises
        `NonFiniteUpdateError` if `trainer.max_bad_steps` updates in a row were not finite, or the weights are not.
        """
        for feature in self.features:
            feature.before_updates(self, batches, step)
        stats, version = StepStatistics(), self.updates
        epochs = self.config.trainer.epochs
        for epoch in range(epochs):
            for index, batch in enumerate(batches):
                has_proximal = batch[0].proximal is not None
                measure = epoch == 0 and (index == 0 or has_proximal)
                with repeatable(self.device) if self.config.trainer.deterministic else nullcontext():
                    self._one_update(batch, stats, version, first=epoch == 0, measure=measure)
                on_progress(epoch * len(batches) + index + 1, epochs * len(batches))
        stats.to_cpu()
        for feature in self.features:
            stats.counts |= feature.after_updates(self)
        if self.ranks.size > 1:
            all_reduce_statistics(stats, self.ranks)
        return stats

    def _one_update(self, batch: MiniBatch, stats: StepStatistics, version: int, *, first: bool, measure: bool) -> None:
        """Makes one optimizer update on the mini-batch `batch`. version: number of updates when the batch was taken.

        first: whether this is the first epoch. measure: whether the log-probs show the mismatch between sampler and
        trainer without the effect of earlier updates on the batch.
        """
        assigned = list(assigned_micro_batches(batch, self.ranks))
        stats.slots += len(assigned) * self.ranks.size
        stats.idle_slots += len(assigned) * self.ranks.size - len(batch)
        # The same conditions on every rank: sharded ranks must run the same number of forwards.
        probe = first and any(feature.probes for feature in self.features)
        perturbs = any(feature.perturbs_policy for feature in self.features)
        state = self._prepare(assigned)
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)  # read once per update
        with reused_casts():  # until the step changes the weights
            for index, micro in assigned:
                clean = self.logp(micro) if probe else None
                scores, _ = self._score(self.model, ForwardPass(micro, "train", index, self.updates, first, measure))
                out = self.objective(self._logps(micro, scores), micro.advantage, state=state)
                (out.loss if micro.rows else scores.logp.sum()).backward()
                if micro.rows:
                    loss_sum += out.loss.detach()
                stats.objective = add_metrics(stats.objective, out.metrics, micro)
                current = clean if perturbs else scores.logp.detach()
                logps = current if micro.proximal is None else micro.proximal
                if logps is not None:
                    # Without a proximal pass, a later mini-batch is scored after the updates on earlier mini-batches.
                    scored_by = self.updates if micro.proximal is None else version
                    perturbed = None if clean is None else scores.logp.detach()
                    stats.add_logps(micro, logps, perturbed, scored_by, measure=measure)
                if micro.rows and not perturbs and (micro.proximal is not None or "proximal" in self.objective.needs):
                    stats.add_drifts(micro, scores.logp.detach())
                stats.tokens += sum(micro.tokens.places.lengths) if micro.rows else 0
        self._step_if_finite(loss_sum, stats)

    def _step_if_finite(self, loss_sum: torch.Tensor, stats: StepStatistics) -> None:
        """Steps the optimizer, or skips the update if the loss or a gradient is not finite."""
        # Group 0 holds the policy. Modules of features have separate groups, outside of clipping and of the check
        # for finite weights: their gradients must not scale the policy's, and they may hold infinite values.
        policy, *others = (group["params"] for group in self.optimizer.param_groups)
        gradients = [parameter.grad for group in others for parameter in group if parameter.grad is not None]
        for gradient in gradients:
            self.ranks.all_reduce_(gradient)  # these parameters are not under FSDP
        stats.lr = learning_rate(self.config.optim, self.updates, self.total_updates) * self.lr_factor
        if self.decay_from is not None:
            stats.lr *= linear_decay(self.updates, self.decay_from, self.total_updates)
        self.optimizer.param_groups[0]["lr"] = stats.lr  # the policy's; other modules have constant rates
        loss = self.ranks.all_reduce_sum(float(loss_sum))
        norm = clip_gradient(policy, self.config.optim.grad_clip, self.ranks)
        others_are_finite = all(bool(gradient.isfinite().all()) for gradient in gradients)
        if math.isfinite(loss) and math.isfinite(norm) and others_are_finite:
            self.optimizer.step()
            check_weights(policy, self.ranks)
            for feature in self.features:
                feature.end_update()
            self.updates += 1
            self.bad_in_a_row = 0
            stats.grad_norms.append(norm)
        else:
            self.bad_in_a_row += 1
            stats.skipped += 1
        self.optimizer.zero_grad(set_to_none=True)
        if self.bad_in_a_row >= self.config.trainer.max_bad_steps:
            values = f"loss {loss:.4g}, gradient norm {norm:.4g}"
            others = " and ".join(name for name in self.modules if name != "model")
            values += "" if others_are_finite else f", that of the {others} as well"
            raise NonFiniteUpdateError(
                f"{self.bad_in_a_row} updates in a row were not finite ({values})", weights_are_good=True
            )

    def _prepare(self, assigned: Sequence[tuple[int, MicroBatch]]) -> Any:
        """Returns the objective's state for one update, such as denominators, over all micro-batches and ranks."""
        state = None
        for index, micro in assigned:
            scores = None
            if "current" in self.objective.prepare_needs:
                with torch.no_grad():
                    scores, _ = self._score(self.model, ForwardPass(micro, "prepare", index, self.updates))
            part = self.objective.prepare(self._logps(micro, scores), micro.advantage)
            state = part if state is None else state + part
        return state.all_reduce() if state is not None and self.ranks.size > 1 else state

    def _logps(self, micro: MicroBatch, scores: TokenScores | None) -> PolicyLogps:
        current, entropy, head = (None, None, None) if scores is None else (scores.logp, scores.entropy, scores.head)
        proximal, needs = micro.proximal, self.objective.needs
        if proximal is None and current is not None and "proximal" in needs:
            proximal = current.detach()
        return PolicyLogps(
            current=current,
            behavior=micro.behavior,
            mask=micro.mask,
            proximal=proximal,
            reference=micro.reference,
            entropy=entropy,
            **{name: getattr(micro, name) for name in ("off_policy", "turn", "age") if name in needs},
            head_current=head,
            head_behavior=micro.extras.get("head_behavior", head),  # an empty micro-batch has no sampler
        )

    def _score(self, model: nn.Module, call: ForwardPass, *, squares: bool = False) -> tuple[TokenScores, MicroBatch]:
        """Runs one forward with all features. Returns its scores, and the micro-batch with what features add to it."""
        micro, config = call.micro, self.config
        options: dict[str, Any] = {}
        with ExitStack() as stack:
            for feature in self.features:
                options |= stack.enter_context(feature.forward(call))
            if config.model.autocast != "none":
                stack.enter_context(torch.autocast(self.device.type, dtype=torch.bfloat16))
            options |= {"temperature": config.sampling.temperature, "entropy": "entropy" in self.objective.needs}
            scores = score(model, micro.tokens, squares=squares, **options)
        if not micro.rows:
            optional = {"entropy": scores.entropy, "head": scores.head, "squares": scores.squares}
            without_rows = {name: None if values is None else values[:0] for name, values in optional.items()}
            return scores._replace(logp=scores.logp[:0], routes=None, **without_rows), micro
        for feature in self.features:
            call = call._replace(micro=feature.after_score(call, scores))
        return scores, call.micro
