"""The same correction in the configuration of Trimtab, verl, TRL and Miles, part by part; what has no equivalent there
is said in a comment. Names as of verl 0.9, TRL 1.16 and Miles 31f1ca96 (docs/recommendations.md).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from trimtab.corrections import OPSM, Band, Divergence, Weight
from trimtab.objectives import Clipped, Objective, Reinforce, objective
from trimtab.objectives.calibrate import bounds_of

VERL_LOWEST = 1e-6
"""verl refuses 0 as a lower bound, and IcePop's form always has one."""

MIS = "examples.infra_features.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp"
ICEPOP = "miles.backends.training_utils.loss_hub.corrections.icepop_function"

ABSENT = {
    "token-alp": "ALP trains a noisy policy, its own code is a fork of verl",
    "seq-alp": "ALP trains a noisy policy, its own code is a fork of verl",
    "soup": "SOUP continues responses of an older policy",
    "oapl": "OAPL is a regression, not a policy gradient",
    "m2po": "M2PO is in its own fork of verl, and in AReaL",
    "luffy": "LUFFY mixes in external traces, its own code is a fork of verl",
    "seq-bypass": "it has no product ratio π/μ",
    "reinforce": "each of its losses has a ratio",
}
"""Presets none of the three has, and why."""

NEAREST = {
    "seq-bypass": {"verl": "token-bypass", "TRL": "token-mis", "Miles": "token-bypass"},
    "seq-alp": {"verl": "token-bypass", "TRL": "token-mis", "Miles": "token-bypass"},
    "token-alp": {"verl": "token-bypass", "TRL": "token-tis", "Miles": "token-bypass"},
    "m2po": {"verl": "token-bypass", "TRL": "token-tis", "Miles": "token-bypass"},
    "token-bypass": {"TRL": "token-tis"},
    "geo-mask": {"Miles": "geo-mask-token-tis"},
}
"""What to set instead: over the same policies, at the nearest level."""


def lines(preset: str, overrides: Mapping[str, Any]) -> dict[str, str]:
    """Configuration by framework: trimtab (TOML), verl (YAML), trl (Python), miles (flags, and YAML where it needs it).

    preset, overrides: as for `trimtab.objective`, which raises `TrimtabError` for what it does not know.
    """
    built = objective(preset, **overrides)
    return {
        "trimtab": _trimtab(preset, overrides),
        "verl": _foreign("verl", preset, overrides, built, _verl),
        "trl": _foreign("TRL", preset, overrides, built, _trl),
        "miles": _foreign("Miles", preset, overrides, built, _miles),
    }


def _foreign(
    name: str, preset: str, given: Mapping[str, Any], built: Objective, write: Callable[[Objective], list[str]]
) -> str:
    nearest = NEAREST.get(preset, {}).get(name)
    if preset not in ABSENT and nearest is None:
        return "\n".join(write(built))
    why = f": {ABSENT[preset]}" if preset in ABSENT else ""
    if nearest is None:
        return f"# {name} has no equivalent of {preset}{why}"
    shared = {key: value for key, value in given.items() if key in bounds_of(nearest)}
    return "\n".join(
        [f"# {name} has no equivalent of {preset}{why}; nearest, {nearest}:", *write(objective(nearest, **shared))]
    )


def _trimtab(preset: str, overrides: Mapping[str, Any]) -> str:
    found = ["[objective]", f"name = {json.dumps(preset)}", *(f"{key} = {value!r}" for key, value in overrides.items())]
    own = bounds_of(preset)
    if own and set(own) <= set(overrides):
        found.append(f"# or, in place of {', '.join(own)}: calibrate = true")
    return "\n".join(found)


def _verl(built: Objective) -> list[str]:
    correction, remarks = _verl_correction(built)
    actor = _verl_actor(built)
    if any(isinstance(rule, OPSM) for rule in built.masks):
        remarks.append("# verl has no OPSM")
    return [
        "algorithm:",
        *(["  norm_adv_by_std_in_grpo: false"] if built.advantage == "dr-grpo" else []),
        "  rollout_correction:",
        *(f"    {line}" for line in correction),
        "actor_rollout_ref:",
        "  rollout:",
        "    calculate_log_probs: true",
        *(["  actor:", *(f"    {line}" for line in actor)] if actor else []),
        *remarks,
    ]


def _verl_correction(built: Objective) -> tuple[list[str], list[str]]:
    """Lines under `rollout_correction`, and remarks."""
    if built.ratio.over == "behavior":
        return ["bypass_mode: true", "loss_type: ppo_clip"], []
    found, remarks, weight = ["rollout_is: null"], [], built.weight
    if weight is not None:
        found = [f"rollout_is: {weight.level}", f"rollout_is_threshold: {weight.high:g}"]
        if weight.bound == "mask":
            found[1] = f'rollout_is_threshold: "{max(weight.low, VERL_LOWEST):g}_{weight.high:g}"'
        elif weight.bound == "clip":
            remarks.append(
                f"# verl only bounds the weight from above; the lower bound {weight.low:g} has no equivalent"
            )
        if weight.normalize:
            found.append("rollout_is_batch_normalize: true")
    for rule in built.masks:
        if isinstance(rule, Band):
            # Its k1 is -log ratio, compared with the logs of the bounds: what it keeps is 1/ratio within them.
            found += [
                "rollout_rs: seq_mean_k1",
                f'rollout_rs_threshold: "{1 / rule.max:.6g}_{1 / max(rule.min, VERL_LOWEST):.6g}"',
            ]
            remarks.append(f"# verl bounds 1/ratio: these are the reciprocals of [{rule.min:g}, {rule.max:g}]")
        elif isinstance(rule, Divergence):
            found += [f"rollout_rs: seq_mean_{rule.kind}", f"rollout_rs_threshold: {rule.max:g}"]
    if built.ratio.level == "sequence":
        remarks.append("# verl clips π/π_old per token; the product of the response has no equivalent")
    return found, remarks


def _verl_actor(built: Objective) -> list[str]:
    surrogate, kind = built.surrogate, built.aggregation.kind
    found = [] if kind == "token-mean" else [f"loss_agg_mode: {kind.replace('constant', 'seq-mean-token-sum-norm')}"]
    if built.aggregation.length_max is not None:
        found.append(f"loss_scale_factor: {built.aggregation.length_max}")
    if isinstance(surrogate, Reinforce):
        return [
            *found,
            "policy_loss: {loss_mode: cispo}",
            "clip_ratio_low: 1.0",
            f"clip_ratio_high: {surrogate.ceiling - 1:g}",
        ]
    assert isinstance(surrogate, Clipped)
    if built.ratio.level == "geometric":
        found.append("policy_loss: {loss_mode: gspo}")
    if built.ratio.level != "sequence":
        found += [f"clip_ratio_low: {surrogate.low:g}", f"clip_ratio_high: {surrogate.high:g}"]
    return found if surrogate.dual is None else [*found, f"clip_ratio_c: {surrogate.dual:g}"]


def _trl(built: Objective) -> list[str]:
    options, remarks = _trl_correction(built)
    surrogate, kind = built.surrogate, built.aggregation.kind
    options["loss_type"] = {"token-mean": "dapo", "seq-mean-token-mean": "grpo", "constant": "dr_grpo"}[kind]
    if isinstance(surrogate, Reinforce):
        options |= {"loss_type": "cispo", "epsilon_high": surrogate.ceiling}
    elif isinstance(surrogate, Clipped) and built.ratio.level != "sequence":
        options |= {"epsilon": surrogate.low, "epsilon_high": surrogate.high}
        options |= {} if surrogate.dual is None else {"delta": surrogate.dual}
    if built.ratio.level == "geometric":
        options["importance_sampling_level"] = "sequence"
    if built.advantage == "dr-grpo":
        options["scale_rewards"] = False
    if built.ratio.level == "sequence":
        remarks.append("# TRL's sequence level is the geometric mean; the product of the response has no equivalent")
    body = [
        f"    {key}={json.dumps(value).replace('true', 'True').replace('false', 'False')},"
        for key, value in options.items()
    ]
    return ["GRPOConfig(", "    use_vllm=True,", *body, ")", *remarks]


def _trl_correction(built: Objective) -> tuple[dict[str, Any], list[str]]:
    options: dict[str, Any] = {"vllm_importance_sampling_correction": built.weight is not None}
    remarks, weight = [], built.weight
    if weight is not None:
        form = "mask" if weight.bound == "mask" else "truncate"
        options["vllm_importance_sampling_mode"] = f"{weight.level}_{form}"
        options["vllm_importance_sampling_clip_max"] = weight.high
        if weight.low > 0:
            options["vllm_importance_sampling_clip_min"] = weight.low
        if weight.normalize:
            remarks.append("# TRL does not normalise the weights")
    for rule in built.masks:
        if isinstance(rule, OPSM):
            options["off_policy_mask_threshold"] = rule.delta
        elif isinstance(rule, Band):
            remarks.append(f"# TRL has no geometric mask [{rule.min:g}, {rule.max:g}]")
        elif isinstance(rule, Divergence):
            remarks.append(f"# TRL has no mask on the mean {rule.kind} of a response ({rule.max:g})")
    return options, remarks


def _miles(built: Objective) -> list[str]:
    surrogate, masks = built.surrogate, built.masks
    if isinstance(surrogate, Reinforce):
        return ["# Miles has no CISPO"]
    assert isinstance(surrogate, Clipped)
    found = [f"--advantage-estimator {'gspo' if built.ratio.level == 'geometric' else 'grpo'}"]
    found += ["--calculate-per-token-loss"] if built.aggregation.kind == "token-mean" else []
    if built.ratio.level != "sequence":
        found += [f"--eps-clip {surrogate.low:g}", f"--eps-clip-high {surrogate.high:g}"]
        found += [] if surrogate.dual is None else [f"--eps-clip-c {surrogate.dual:g}"]
    else:
        found.append("# Miles clips π/π_old per token; the product of the response has no equivalent")
    if built.advantage == "dr-grpo":
        found += ["--disable-grpo-std-normalization", "# its constant denominator is examples/experimental/DrGRPO"]
    if built.ratio.over == "behavior":
        return [*found, "--use-rollout-logprobs"]
    band = next((rule for rule in masks if isinstance(rule, Band)), None)
    for rule in masks:
        if isinstance(rule, OPSM):
            found += ["--use-opsm", f"--opsm-delta {rule.delta:g}", "# Miles compares with π_old, not with the sampler"]
        elif isinstance(rule, Divergence):
            found.append(f"# Miles has no mask on the mean {rule.kind} of a response ({rule.max:g})")
    return found if built.weight is None else [*found, *_miles_weight(built.weight, band)]


def _miles_weight(weight: Weight, band: Band | None) -> list[str]:
    """Built in where it can be, otherwise the mismatch helper of its examples with a file of its own."""
    if weight.level == "token" and band is None and not weight.normalize:
        custom = [f"--custom-tis-function-path {ICEPOP}"] if weight.bound == "mask" else []
        return ["--use-tis", *custom, f"--tis-clip {weight.high:g}", f"--tis-clip-low {weight.low:g}"]
    settings = {
        "use_tis": "true",
        "tis_level": weight.level,
        "tis_mode": weight.bound,
        "tis_lower_bound": f"{float(weight.low)!r}",
        "tis_upper_bound": f"{float(weight.high)!r}",
        "tis_batch_normalize": str(weight.normalize).lower(),
        "use_rs": str(band is not None).lower(),
    }
    if band is not None:
        bounds = {"rs_lower_bound": f"{float(band.min)!r}", "rs_upper_bound": f"{float(band.max)!r}"}
        settings |= {"rs_level": band.level, **bounds}
    missing = () if band is not None else ("rs_lower_bound", "rs_upper_bound")
    settings |= dict.fromkeys((*missing, "rs_veto_threshold"), "null")
    return [
        "--use-tis",
        f"--custom-tis-function-path {MIS}",
        "--custom-config-path mis.yaml",
        "# mis.yaml",
        *(f"{key}: {value}" for key, value in settings.items()),
    ]
