"""A Trimtab objective with the signature of verl's policy losses (`trimtab.adapters.verl` registers them)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from trimtab.adapters.hooks import averaged, build, counted_state, evaluate
from trimtab.errors import TrimtabError
from trimtab.objectives import Objective, keywords_of

LOSS_PREFIX = "trimtab-"
"""Before the name of an objective, as a value of `policy_loss.loss_mode` or `rollout_correction.rollout_is`."""
CARRY_LOGPS = "trimtab"
"""The value of `rollout_correction.rollout_is` that carries the sampler's log-probs to the loss."""
OBJECTIVES_VARIABLE = "TRIMTAB_OBJECTIVES"
MODES = {"constant": "seq-mean-token-sum-norm"}
"""verl's `loss_agg_mode` where its name is not that of the aggregation."""


class PolicyLoss:
    """An objective with the signature of verl's policy losses, built at its first call: some need numbers of verl."""

    def __init__(self, name: str, keywords: Mapping[str, Any]) -> None:
        self.name, self.keywords = name, dict(keywords)
        self._objective: Objective | None = None

    def __call__(
        self,
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        """Returns the share of a micro-batch in the loss of the mini-batch, and metrics. All tensors are (batch, time).

        Denominators are verl's own, of the whole mini-batch; without them, those of the given batch. Raises
        `TrimtabError` where `loss_agg_mode` is not the aggregation of the objective, and without log-probs it reads.
        """
        counts = dict(getattr(config, "global_batch_info", None) or {})
        mask = response_mask.bool()
        objective = self.validated_objective(loss_agg_mode, counts.get("loss_scale_factor"))
        tokens, sequences = counts.get("batch_num_tokens"), counts.get("global_batch_size")
        state = counted_state(
            mask.sum() if tokens is None else tokens,
            mask.any(1).sum() if sequences is None else sequences,  # As verl counts them.
            like=log_prob,
        )
        behavior = _sampler_logps(objective, rollout_is_weights, mask)
        loss, metrics, _ = evaluate(
            objective, mask, advantages, current=log_prob, behavior=behavior, proximal=old_log_prob, state=state
        )
        return loss * (counts.get("dp_size") or 1), {f"actor/{key}": value for key, value in averaged(metrics).items()}

    def validated_objective(self, loss_agg_mode: str, factor: int | None) -> Objective:
        """Returns the objective. Raises `TrimtabError` where verl aggregates, or scales, otherwise."""
        objective = self._built(factor)
        wanted = MODES.get(objective.aggregation.kind, objective.aggregation.kind)
        if loss_agg_mode != wanted:
            raise TrimtabError(
                f"{objective.name} aggregates by {wanted}, and verl by {loss_agg_mode}: set "
                f"actor_rollout_ref.actor.loss_agg_mode={wanted}, or give the objective another aggregation in the "
                f"file of {OBJECTIVES_VARIABLE}"
            )
        return objective

    def _built(self, factor: int | None) -> Objective:
        if self._objective is not None:
            return self._objective
        keywords = dict(self.keywords)
        if keywords.get("aggregation", keywords_of(self.name).get("aggregation")) == "constant":
            # The constant length is verl's: its KL and entropy terms divide by it too.
            if factor is None:
                raise TrimtabError(f"{self.name} divides by a constant length: set actor.loss_scale_factor to it")
            if keywords.setdefault("length_max", int(factor)) != factor:
                raise TrimtabError(f"{self.name}: length_max is not actor.loss_scale_factor = {factor}: leave it out")
        self._objective = build("verl", self.name, keywords)
        return self._objective


def _sampler_logps(objective: Objective, carried: Tensor | None, mask: Tensor) -> Tensor | None:
    """Returns the sampler's log-probs, which verl passes on in `rollout_is_weights`."""
    if "behavior" not in objective.needs:
        return None
    if carried is None:
        raise TrimtabError(
            f"{objective.name} reads the sampler's log-probs: set actor_rollout_ref.rollout.calculate_log_probs=True "
            f"and algorithm.rollout_correction.rollout_is={CARRY_LOGPS}, without bypass_mode"
        )
    if bool((carried[mask] > 0).any()):
        raise TrimtabError(
            f"rollout_is_weights holds weights, not the sampler's log-probs that {objective.name} reads: set "
            f"algorithm.rollout_correction.rollout_is={CARRY_LOGPS}"
        )
    return carried
