"""Renders an objective as configuration of Trimtab, verl, TRL and Miles, from the settings of its parts.

A comment names what a framework has no equivalent of. Option names are those of verl 0.9, TRL 1.16 and Miles 31f1ca96
(docs/choosing.md).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trimtab.adapters.hooks import hook
from trimtab.corrections import Setting
from trimtab.objectives import Objective, objective
from trimtab.objectives.calibrate import bounds_of

MIS = "examples.infra_features.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp"

ABSENT = {
    "token-alp": "ALP trains a noisy policy, its own code is a fork of verl",
    "seq-alp": "ALP trains a noisy policy, its own code is a fork of verl",
    "soup": "SOUP continues responses of an older policy",
    "oapl": "OAPL is a regression, not a policy gradient",
    "m2po": "M2PO is in its own fork of verl, and in AReaL",
    "luffy": "LUFFY mixes in external traces, its own code is a fork of verl",
    "seq-bypass": "it has no product ratio π/μ",
    "reinforce": "each of its losses has a ratio",
    "turn-tis": "its weights are of tokens or of whole responses",
}
"""Presets that verl, TRL and Miles all lack, with the reason."""

NEAREST = {
    "seq-bypass": {"verl": "token-bypass", "TRL": "seq-mis", "Miles": "token-bypass"},
    "seq-alp": {"verl": "token-bypass", "TRL": "seq-mis", "Miles": "token-bypass"},
    "token-alp": {"verl": "token-bypass", "TRL": "token-tis", "Miles": "token-bypass"},
    "turn-tis": {"verl": "token-tis", "TRL": "token-tis", "Miles": "token-tis"},
    "m2po": {"verl": "token-bypass", "TRL": "token-tis", "Miles": "token-bypass"},
    "token-bypass": {"TRL": "token-tis"},
    "geo-mask": {"Miles": "geo-mask-token-tis"},
}
"""The most similar preset of a framework that lacks one: the same policies in the ratio, the nearest level."""


def lines(preset: str, overrides: Mapping[str, Any]) -> dict[str, str]:
    """Returns configuration by framework: trimtab (TOML), verl (YAML), trl (Python), miles (flags, YAML where needed).

    preset, overrides: as for `trimtab.objective`, custom functions (`module:function`) included. Raises `TrimtabError`
    for unknown presets and keywords.
    """
    built = objective(preset, **overrides)
    keywords = "".join(f", {key}={value!r}" for key, value in overrides.items())
    trl = f"trimtab.adapters.trl.GRPOTrainer(..., objective=trimtab.objective({json.dumps(preset)}{keywords}))"
    named = preset
    if overrides or ":" in preset:
        named = "mine, and TRIMTAB_OBJECTIVES names a file with the lines of Trimtab under [mine]"
    verl = f"actor_rollout_ref.actor.policy_loss.loss_mode=trimtab-{named}"
    return {
        "trimtab": _trimtab(preset, overrides),
        "verl": _foreign("verl", preset, overrides, built, _verl) + _adapter("verl", verl, built),
        "trl": _foreign("TRL", preset, overrides, built, _trl) + _adapter("trl", trl, built),
        "miles": _foreign("Miles", preset, overrides, built, _miles),
    }


def _adapter(trainer: str, line: str, built: Objective) -> str:
    """Returns what has exactly this loss in a trainer, as a comment; nothing where the adapter cannot carry it."""
    if hook(trainer).refusal(built) is not None:
        return ""
    return f"\n# exactly this loss, with Trimtab's adapter (docs/adapters.md):\n# {line}"


def _foreign(
    name: str, preset: str, overrides: Mapping[str, Any], built: Objective, render: Callable[[Objective], list[str]]
) -> str:
    nearest = NEAREST.get(preset, {}).get(name)
    supported = name in built.surrogate.peers(built.ratio.level)
    if preset not in ABSENT and nearest is None and supported:
        regularized = built.kl.coef > 0 or built.entropy_coef > 0
        others = [f"# kl_coef and entropy_coef are left out: set {name}'s own"] if regularized else []
        return "\n".join([*render(built), *others])
    reason = f": {ABSENT[preset]}" if preset in ABSENT else ""
    if nearest is None:
        return f"# {name} has no equivalent of {preset}{reason}"
    shared = {key: value for key, value in overrides.items() if key in bounds_of(nearest)}
    return "\n".join(
        [f"# {name} has no equivalent of {preset}{reason}; nearest, {nearest}:", *render(objective(nearest, **shared))]
    )


def _trimtab(preset: str, overrides: Mapping[str, Any]) -> str:
    rows = ["[objective]", f"name = {json.dumps(preset)}", *(f"{key} = {value!r}" for key, value in overrides.items())]
    bounds = bounds_of(preset)
    if bounds and set(bounds) <= set(overrides):
        rows.append(f"# or, in place of {', '.join(bounds)}: calibrate = true")
    return "\n".join(rows)


def _surrogate(built: Objective, name: str) -> Setting:
    return built.surrogate.peers(built.ratio.level)[name]


def _masks(built: Objective, name: str) -> Iterator[Setting]:
    for rule in built.masks:
        missing = Setting(remarks=(f"# {name} has no equivalent of: keep where {rule.equation()}",))
        yield rule.peers().get(name, missing)


def _verl(built: Objective) -> list[str]:
    correction, remarks = _verl_correction(built)
    actor = _verl_actor(built)
    return [
        "algorithm:",
        *(["  norm_adv_by_std_in_grpo: false"] if built.advantage == "dr-grpo" else []),
        "  rollout_correction:",
        *(f"    {key}: {value}" for key, value in correction.items()),
        "actor_rollout_ref:",
        "  rollout:",
        "    calculate_log_probs: true",
        *(["  actor:", *(f"    {key}: {value}" for key, value in actor.items())] if actor else []),
        *remarks,
        *_surrogate(built, "verl").remarks,
    ]


def _verl_correction(built: Objective) -> tuple[dict[str, str], list[str]]:
    """Returns keys of `rollout_correction`, and remarks. Several rules share one key, separated by commas."""
    options, remarks = {"rollout_is": "null"}, []
    if built.ratio.over == "behavior":
        options = {"bypass_mode": "true", "loss_type": "ppo_clip"}
    elif built.weight is not None:
        setting = built.weight.peers()["verl"]
        options, remarks = dict(setting.options), [*setting.remarks]
    rules: dict[str, list[str]] = {}
    for setting in _masks(built, "verl"):
        remarks += setting.remarks
        for key, value in setting.options.items():
            rules.setdefault(key, []).append(value)
    for key, values in rules.items():
        joined = ",".join(value.strip('"') for value in values)
        options[key] = values[0] if len(values) == 1 else f'"{joined}"'
    if rules and built.ratio.over == "behavior":
        remarks.append("# in bypass mode verl judges π/μ, not π_old/μ")
    return options, remarks


def _verl_actor(built: Objective) -> dict[str, str]:
    aggregation = built.aggregation
    options = {}
    if aggregation.kind != "token-mean":
        options["loss_agg_mode"] = aggregation.kind.replace("constant", "seq-mean-token-sum-norm")
    if aggregation.length_max is not None:
        options["loss_scale_factor"] = str(aggregation.length_max)
    return options | dict(_surrogate(built, "verl").options)


def _trl(built: Objective) -> list[str]:
    loss = {"token-mean": "dapo", "seq-mean-token-mean": "grpo", "constant": "dr_grpo"}.get(built.aggregation.kind)
    surrogate, weight = _surrogate(built, "TRL"), built.weight
    options = {"vllm_importance_sampling_correction": str(weight is not None)}
    settings = [*([] if weight is None else [weight.peers()["TRL"]]), *_masks(built, "TRL")]
    remarks = [remark for setting in settings for remark in setting.remarks]
    for setting in settings:
        options |= setting.options
    if loss is None:
        remarks.append(f"# TRL has no equivalent of aggregation {built.aggregation.kind}")
    else:
        options["loss_type"] = json.dumps(loss)
    options |= surrogate.options
    if built.advantage == "dr-grpo":
        options["scale_rewards"] = "False"
    body = [f"    {key}={value}," for key, value in options.items()]
    return ["GRPOConfig(", "    use_vllm=True,", *body, ")", *remarks, *surrogate.remarks]


def _miles(built: Objective) -> list[str]:
    surrogate, weight = _surrogate(built, "Miles"), built.weight
    rows = [f"--advantage-estimator {'gspo' if built.ratio.level == 'geometric' else 'grpo'}"]
    rows += ["--calculate-per-token-loss"] if built.aggregation.kind == "token-mean" else []
    rows += [*_flags(surrogate), *surrogate.remarks]
    if built.advantage == "dr-grpo":
        rows += ["--disable-grpo-std-normalization", "# its constant denominator is examples/experimental/DrGRPO"]
    helper: dict[str, str] = {}
    for setting in _masks(built, "Miles"):
        rows += [*_flags(setting), *setting.remarks]
        helper |= _keys(setting)
    if built.ratio.over == "behavior":
        rows.append("--use-rollout-logprobs")
    if weight is None:
        return [*rows, *(["# Miles' mismatch helper rejects beside a weight only"] if helper else [])]
    setting = weight.peers()["Miles"]
    built_in = _flags(setting)
    if built_in and not helper:
        return [*rows, *built_in]
    settings = {**_keys(setting), "use_rs": "false", **helper}
    for key in ("rs_lower_bound", "rs_upper_bound", "rs_veto_threshold"):
        settings.setdefault(key, "null")
    # Flags and configuration file of the mismatch helper in Miles' examples.
    rows += ["--use-tis", f"--custom-tis-function-path {MIS}", "--custom-config-path mis.yaml", "# mis.yaml"]
    return [*rows, *(f"{key}: {value}" for key, value in settings.items())]


def _flags(setting: Setting) -> list[str]:
    return [f"{key} {value}".rstrip() for key, value in setting.options.items() if key.startswith("--")]


def _keys(setting: Setting) -> dict[str, str]:
    return {key: value for key, value in setting.options.items() if not key.startswith("--")}
