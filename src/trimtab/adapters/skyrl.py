"""Trimtab objectives as policy losses of SkyRL. Checked against SkyRL a9564572.

import trimtab.adapters.skyrl
trimtab.adapters.skyrl.register("icepop")     # before ray.init; then policy_loss_type=trimtab-icepop
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from trimtab.adapters.hooks import build, hook, peer_module, refuse_standard_deviation
from trimtab.adapters.loss_settings import refuse_chosen
from trimtab.adapters.micro_batch import averaged, evaluate
from trimtab.adapters.recording import Dump, MonitorChoice
from trimtab.errors import TrimtabError
from trimtab.objectives import Aggregation, Objective, PolicyLogps

REDUCTIONS = {"token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean", "constant": "seq_mean_token_sum_norm"}
"""Aggregation of the objective -> SkyRL's `trainer.algorithm.loss_reduction`."""


def register(
    objective: str | Objective | None = None,
    name: str | None = None,
    *,
    dump: str | None = None,
    monitor: MonitorChoice = None,
    **keywords: Any,
) -> str:
    """Registers an objective with SkyRL and returns its name there, by default `trimtab-NAME`.

    Call it before `ray.init`, in the script that starts the training; then set
    `trainer.algorithm.policy_loss_type` to the name. dump: a folder for the log-probs of every call, which `trimtab
    diagnose` reads. monitor: True for the scalars and alarms of `trimtab.Monitor`, or a folder into which each process
    also writes its files. Raises `TrimtabError` without an objective: SkyRL's workers look its own losses up by name,
    so those cannot be wrapped.
    """
    built = build("skyrl", objective, keywords)
    registered = name or f"trimtab-{built.name}"
    utils = peer_module("SkyRL", "skyrl.backends.skyrl_train.utils.ppo_utils")
    utils.PolicyLossRegistry.register(registered, policy_loss(built, dump=dump, monitor=monitor))
    return registered


def policy_loss(
    objective: str | Objective, *, dump: str | None = None, monitor: MonitorChoice = None, **keywords: Any
) -> Callable[..., tuple[Tensor, dict[str, float]]]:
    """Returns a policy loss with SkyRL's signature.

    SkyRL divides the advantages by the denominators of `loss_reduction` before it calls the loss, so the loss is a sum
    over tokens. Raises `TrimtabError` if `loss_reduction` is not the aggregation of the objective, and for settings
    that only SkyRL's own losses read (`eps_clip_low`, `off_policy_correction`, ...).
    """
    built = build("skyrl", objective, keywords)
    written = None if dump is None else Dump(dump)
    summed = replace(built, aggregation=Aggregation("token-mean", built.aggregation.denominator))

    def loss(
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        config: Any,
        loss_mask: Tensor | None = None,
        rollout_logprobs: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        _check_config(built, config)
        if "behavior" in built.needs and rollout_logprobs is None:
            raise hook("skyrl").absent(built.name, "behavior")
        mask = loss_mask.bool() if loss_mask is not None else log_probs.new_ones(log_probs.shape).bool()
        logps = PolicyLogps(log_probs, rollout_logprobs, mask, proximal=old_log_probs)
        value, metrics, _ = evaluate(summed, logps, advantages, counts=(1, 1), dump=written, monitor=monitor)
        return value, averaged(metrics)

    return loss


def _check_config(objective: Objective, config: Any) -> None:
    refuse_chosen("SkyRL", "SKYRL", config, "In register")
    divides = getattr(config, "grpo_norm_by_std", False)
    refuse_standard_deviation(objective, divides, "set trainer.algorithm.grpo_norm_by_std=false")
    kind, reduction = objective.aggregation.kind, config.loss_reduction
    if reduction != REDUCTIONS[kind]:
        raise TrimtabError(
            f"{objective.name} aggregates by {kind!r}, and loss_reduction is {reduction!r}: set it to "
            f"{REDUCTIONS[kind]!r}, or give the objective another aggregation"
        )
    if kind == "constant" and objective.aggregation.length_max != config.max_seq_len:
        raise TrimtabError(
            f"{objective.name} divides by length_max = {objective.aggregation.length_max}, and SkyRL by "
            f"trainer.algorithm.max_seq_len = {config.max_seq_len}: set both to the same number"
        )
