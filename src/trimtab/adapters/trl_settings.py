"""Settings of TRL's `GRPOConfig` that a loss of Trimtab's refuses."""

from __future__ import annotations

import dataclasses
from typing import Any

from trimtab.adapters.loss_settings import TRL, chosen, refuse
from trimtab.errors import TrimtabError
from trimtab.objectives import Objective


def check_ignored(args: Any, config_class: type) -> None:
    """Raises `TrimtabError` for options that only TRL's own loss reads, with what replaces them.

    args: the configuration of a run. config_class: its class, for the defaults.
    """
    defaults = {item.name: item.default for item in dataclasses.fields(config_class)}
    settings = {name: one._replace(default=defaults[name]) for name, one in TRL.items() if name in defaults}
    refuse("TRL", settings, chosen(settings, args))


def check_settings(objective: Objective, args: Any, config_class: type) -> None:
    """Raises `TrimtabError` for settings of TRL that would have no effect, or that the objective needs otherwise.

    args: the `GRPOConfig` of a run. config_class: that class, for the defaults.
    """
    check_ignored(args, config_class)
    steps, window = args.steps_per_generation, args.gradient_accumulation_steps
    if steps % window:
        raise TrimtabError(
            f"steps_per_generation = {steps} is not a multiple of gradient_accumulation_steps = {window}: an update "
            "would span two generations and its denominators are not known at its start: make it a multiple"
        )
    if args.use_vllm and not args.vllm_importance_sampling_correction:
        raise TrimtabError("set vllm_importance_sampling_correction=True: with it TRL computes old_per_token_logps")
    if (objective.kl.coef > 0) != (args.beta != 0):
        value = "0.1 (only that it is not 0 counts)" if objective.kl.coef > 0 else "0"
        raise TrimtabError(f"kl_coef of the objective is {objective.kl.coef:g}: set beta={value} in GRPOConfig")
    unbiased = objective.kl.kind == "unbiased"
    if objective.kl.coef > 0 and unbiased != args.use_bias_correction_kl:
        other = "k3" if unbiased else "unbiased"
        raise TrimtabError(
            f'kl of the objective is "{objective.kl.kind}": set use_bias_correction_kl={unbiased} in GRPOConfig '
            f'(TRL\'s default is True), or kl="{other}" in the objective'
        )
    if objective.advantage == "dr-grpo" and args.scale_rewards not in ("none", False):
        raise TrimtabError(f'{objective.name} has advantages without the standard deviation: set scale_rewards="none"')
