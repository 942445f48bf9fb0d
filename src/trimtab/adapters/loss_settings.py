"""Settings that the policy loss of each trainer reads, and what becomes of them beside a loss of Trimtab.

A setting without effect would be believed: each is taken over as a keyword of the objective where both mean the same,
or refused with what replaces it. Those of losses that no preset has, such as verl's `clip_cov`, are left alone: the
trainer itself reads them only where that loss is chosen. Versions are those of docs/adapters.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from trimtab.errors import TrimtabError


class LossSetting(NamedTuple):
    """A setting that is refused, or taken over, where its value is not the trainer's default.

    default: that of the trainer, which a user who sets nothing has. instead: what replaces it in the objective; empty
    where nothing does. keyword: the keyword of an objective as which it is taken over; empty where it is refused.
    """

    default: Any
    instead: str = ""
    keyword: str = ""


LossSettings = Mapping[str, LossSetting]

LOW, HIGH, DUAL = LossSetting(0.2, "clip_low"), LossSetting(0.2, "clip_high"), LossSetting(None, "clip_dual")
PRESET = "the preset, objective=NAME, and its aggregation"
WEIGHT = "weight_max, of a preset with a weight (token-tis, icepop, ...)"
WEIGHT_MIN = WEIGHT.replace("max", "min")
OWN_BOUND = "a bound that this objective has (trimtab explain NAME)"
CONSTANT_ENTROPY = "entropy_coef, which stays constant"

TRL: LossSettings = {
    "loss_type": LossSetting("dapo", PRESET),
    "epsilon": LossSetting(0.2, "clip_low and clip_high"),
    "epsilon_high": LossSetting(None, "clip_high"),
    "delta": DUAL,
    "importance_sampling_level": LossSetting("token", 'the preset, objective="gspo" for "sequence"'),
    "top_entropy_quantile": LossSetting(1.0),
    "entropy_coef": LossSetting(0.0, "entropy_coef"),
    "use_adaptive_entropy": LossSetting(False, CONSTANT_ENTROPY),
    "entropy_coef_delta": LossSetting(0.005, CONSTANT_ENTROPY),
    "entropy_coef_min": LossSetting(0.0, CONSTANT_ENTROPY),
    "entropy_coef_max": LossSetting(1.0, CONSTANT_ENTROPY),
    "entropy_target": LossSetting(0.2, CONSTANT_ENTROPY),
    "off_policy_mask_threshold": LossSetting(None, "delta, of the preset opsm"),
    "sapo_temperature_neg": LossSetting(1.05, "tau_negative, of the preset sapo"),
    "sapo_temperature_pos": LossSetting(1.0, "tau_positive, of the preset sapo"),
    "vespo_k_neg": LossSetting(3.0, "k1_negative, of the preset vespo"),
    "vespo_k_pos": LossSetting(2.0, "k1_positive, of the preset vespo"),
    "vespo_lambda_neg": LossSetting(2.0, "k2_negative, of the preset vespo"),
    "vespo_lambda_pos": LossSetting(3.0, "k2_positive, of the preset vespo"),
    "vllm_importance_sampling_mode": LossSetting("sequence_mask", "the preset: token-tis, seq-tis, icepop or seq-mis"),
    "vllm_importance_sampling_clip_max": LossSetting(3.0, WEIGHT),
    "vllm_importance_sampling_clip_min": LossSetting(None, WEIGHT_MIN),
}
"""`GRPOConfig` and `AsyncGRPOConfig` of TRL 1.16."""

VERL_ACTOR: LossSettings = {
    "clip_ratio": LossSetting(
        0.2, "clip_low and clip_high: verl reads this only where clip_ratio_low or _high is null"
    ),
    "clip_ratio_low": LossSetting(0.2, OWN_BOUND, "clip_low"),
    "clip_ratio_high": LossSetting(0.2, OWN_BOUND, "clip_high"),
    "clip_ratio_c": LossSetting(3.0, OWN_BOUND, "clip_dual"),
    "tau_pos": LossSetting(1.0, "tau_positive, of the preset sapo", "tau_positive"),
    "tau_neg": LossSetting(1.05, "tau_negative, of the preset sapo", "tau_negative"),
}
"""`actor_rollout_ref.actor` of verl 0.9.1."""

VERL_CORRECTION: LossSettings = {
    "rollout_is_threshold": LossSetting(2.0, WEIGHT),
    "rollout_is_batch_normalize": LossSetting(False, "normalize, of a preset with a weight"),
    "rollout_rs": LossSetting(None, "a preset with a mask (geo-mask, k3-mask, ...), or mask"),
    "rollout_rs_threshold": LossSetting(None, "keep_min, keep_max or divergence_max"),
    "loss_type": LossSetting("ppo_clip", "the preset token-bypass"),
}
"""`algorithm.rollout_correction` of verl 0.9.1, where `rollout_is` names Trimtab."""

SKYRL: LossSettings = {
    "eps_clip_low": LOW,
    "eps_clip_high": HIGH,
    "clip_ratio_c": LossSetting(3.0, "clip_dual"),
    "use_tis": LossSetting(False, WEIGHT),
    "tis_imp_ratio_cap": LossSetting(-1.0, WEIGHT),
    "off_policy_correction.tis_ratio_type": LossSetting(None, "the preset: token-tis or seq-tis"),
    "off_policy_correction.sequence_mask_metric": LossSetting(None, "the preset: seq-mis or geo-mask"),
    "off_policy_correction.outlier_token_is_threshold_low": LossSetting(None, "mask"),
    "off_policy_correction.outlier_token_is_threshold_high": LossSetting(None, "mask"),
    "off_policy_correction.token_mask_is_threshold_low": LossSetting(None, "weight_min, of the preset icepop"),
    "off_policy_correction.token_mask_is_threshold_high": LossSetting(None, "weight_max, of the preset icepop"),
    "sapo.tau_pos": LossSetting(1.0, "tau_positive, of the preset sapo"),
    "sapo.tau_neg": LossSetting(1.05, "tau_negative, of the preset sapo"),
    "cispo.cispo_eps_clip_low": LossSetting(1.0),
    "cispo.cispo_eps_clip_high": LossSetting(4.0, "ceiling, of the preset cispo, 1 larger"),
    "cispo.cispo_anchor": LossSetting("old", "ratio"),
    "dppo.dppo_type": LossSetting("binary_tv", "the preset: dppo or dppo-kl"),
    "dppo.delta_low": LossSetting(0.2, "divergence_max, of the preset dppo"),
    "dppo.delta_high": LossSetting(0.2, "divergence_max, of the preset dppo"),
}
"""`trainer.algorithm` of SkyRL."""

NEMO_RL: LossSettings = {
    "disable_ppo_ratio": LossSetting(False, "the preset reinforce"),
    "sequence_level_importance_ratios": LossSetting(False, "the preset gspo"),
    "ratio_clip_min": LOW,
    "ratio_clip_max": HIGH,
    "ratio_clip_c": DUAL,
    "truncated_importance_sampling_type": LossSetting(None, "the preset: token-tis, icepop or geo-mask"),
    "truncated_importance_sampling_ratio": LossSetting(None, WEIGHT),
    "truncated_importance_sampling_ratio_min": LossSetting(None, WEIGHT_MIN),
    "use_on_policy_kl_approximation": LossSetting(False, 'kl="unbiased"'),
    "reference_policy_kl_type": LossSetting("k3", "kl"),
    "kl_input_clamp_value": LossSetting(20.0),
    "kl_output_clamp_value": LossSetting(10.0),
    "use_cispo": LossSetting(False, "the preset cispo"),
    "positive_example_nll_weight": LossSetting(0.0),
}
"""Attributes of NeMo-RL's `ClippedPGLossFn`, which are keys of `loss_fn`."""

MILES: LossSettings = {
    "eps_clip": LOW,
    "eps_clip_high": HIGH,
    "eps_clip_c": DUAL,
    "kl_loss_type": LossSetting("k1", "kl"),
    "use_unbiased_kl": LossSetting(False, 'kl="unbiased"'),
}
"""Flags of Miles and slime that their `policy_loss` reads, beside a whole objective."""

MILES_TIS: LossSettings = {"tis_clip": LossSetting(2.0, WEIGHT), "tis_clip_low": LossSetting(0.0, WEIGHT_MIN)}
"""Flags of Miles and slime that their own weights read, beside a correction of Trimtab."""

AREAL: LossSettings = {
    "eps_clip": LOW,
    "eps_clip_higher": LossSetting(None, "clip_high"),
    "c_clip": DUAL,
    "rejection_sampling": LossSetting(None, "a preset with a weight or a mask (token-tis, icepop, geo-mask, ...)"),
    "m2_threshold": LossSetting(None),
    "importance_sampling_level": LossSetting("token", 'the preset, "gspo" for "sequence"'),
    "use_sapo_loss": LossSetting(False, "the preset sapo"),
    "sapo_tau_pos": LossSetting(1.0, "tau_positive, of the preset sapo"),
    "sapo_tau_neg": LossSetting(1.05, "tau_negative, of the preset sapo"),
}
"""Keys of AReaL's `actor` that it passes to its loss."""

OPENRLHF: LossSettings = {
    "clip_eps_low": LOW,
    "clip_eps_high": HIGH,
    "dual_clip": DUAL,
    "policy_loss_type": LossSetting("ppo", 'the preset, "gspo" for "gspo"'),
    "vllm_is_truncated_threshold": LossSetting([0.5, 5.0], "weight_min and weight_max, of the preset icepop"),
    "vllm_is_correction_type": LossSetting("tis", "the preset: token-tis, icepop or geo-mask"),
}
"""Arguments of OpenRLHF's `PolicyLoss`."""

_ABSENT = object()


def chosen(settings: LossSettings, configuration: Any) -> dict[str, Any]:
    """Returns the settings of a configuration that are not at the trainer's default, with their values.

    configuration: an object with attributes or a mapping; `a.b` is the field b of its field a. What it does not have is
    at its default.
    """
    found = {name: _value(configuration, name) for name in settings}
    return {name: value for name, value in found.items() if value not in (_ABSENT, settings[name].default)}


def _value(configuration: Any, name: str) -> Any:
    for key in name.split("."):
        is_table = isinstance(configuration, Mapping)
        configuration = configuration.get(key, _ABSENT) if is_table else getattr(configuration, key, _ABSENT)
    return configuration


def refuse(trainer: str, settings: LossSettings, names: Iterable[str], where: str = "In the objective") -> None:
    """Raises `TrimtabError` if there are names: settings that only the trainer's own loss would read.

    where: begins what replaces them.
    """
    if names := list(names):
        replaced = ((name, settings[name].instead) for name in names)
        instead = "; ".join(f"{name} is {ours}" if ours else f"{name} has no equivalent" for name, ours in replaced)
        raise TrimtabError(
            f"{', '.join(names)}: only {trainer}'s own loss reads this, leave it out. {where}: {instead}"
        )
