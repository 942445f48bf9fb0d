"""Settings of TRL's `GRPOConfig` that a loss of Trimtab's refuses."""

from __future__ import annotations

import dataclasses
from typing import Any

from trimtab.errors import TrimtabError
from trimtab.objectives import Objective

CLIP = "clip_low and clip_high"
PRESET = "the preset, objective=NAME, and its aggregation"
WEIGHT = "weight_max, of a preset with a weight (token-tis, icepop, ...)"
CONSTANT_ENTROPY = "entropy_coef, which stays constant"
LOSS_OPTIONS = {
    "loss_type": PRESET,
    "epsilon": CLIP,
    "epsilon_high": "clip_high",
    "delta": "clip_dual",
    "importance_sampling_level": 'the preset, objective="gspo" for "sequence"',
    "top_entropy_quantile": None,
    "entropy_coef": "entropy_coef",
    "use_adaptive_entropy": CONSTANT_ENTROPY,
    "entropy_coef_delta": CONSTANT_ENTROPY,
    "entropy_coef_min": CONSTANT_ENTROPY,
    "entropy_coef_max": CONSTANT_ENTROPY,
    "entropy_target": CONSTANT_ENTROPY,
    "off_policy_mask_threshold": "delta, of the preset opsm",
    "sapo_temperature_neg": "tau_negative, of the preset sapo",
    "sapo_temperature_pos": "tau_positive, of the preset sapo",
    "vespo_k_neg": "k1_negative, of the preset vespo",
    "vespo_k_pos": "k1_positive, of the preset vespo",
    "vespo_lambda_neg": "k2_negative, of the preset vespo",
    "vespo_lambda_pos": "k2_positive, of the preset vespo",
    "vllm_importance_sampling_mode": "the preset: token-tis, seq-tis, icepop or seq-mis",
    "vllm_importance_sampling_clip_max": WEIGHT,
    "vllm_importance_sampling_clip_min": WEIGHT.replace("max", "min"),
}
"""Options of `GRPOConfig` that only TRL's own loss reads, with what replaces them in the objective."""


def check_ignored(args: Any, config_class: type) -> None:
    """Raises `TrimtabError` for options that only TRL's own loss reads, with what replaces them.

    args: the configuration of a run. config_class: its class, for the defaults.
    """
    defaults = {item.name: item.default for item in dataclasses.fields(config_class)}
    ignored = [name for name in LOSS_OPTIONS if name in defaults and getattr(args, name) != defaults[name]]
    if ignored:
        instead = "; ".join(f"for {name} {LOSS_OPTIONS[name] or 'there is nothing'}" for name in ignored)
        raise TrimtabError(
            f"{', '.join(ignored)}: only TRL's own loss reads this, leave it out. In the objective: {instead}"
        )


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
