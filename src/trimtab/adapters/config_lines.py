"""The same correction in the configuration of Trimtab, verl, TRL and Miles, put together from what each part says of
itself; what has no equivalent there is said in a comment. Names as of verl 0.9, TRL 1.16 and Miles 31f1ca96
(docs/recommendations.md).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

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

    preset, overrides: as for `trimtab.objective`, which raises `TrimtabError` for what it does not know. A function of
    one's own, `module:function`, is as good as a preset.
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
    known = name in built.surrogate.peers(built.ratio.level)
    if preset not in ABSENT and nearest is None and known:
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
    """Keys of `rollout_correction`, and remarks. Several rules are one key, separated by commas."""
    found, remarks = {"rollout_is": "null"}, []
    if built.ratio.over == "behavior":
        found = {"bypass_mode": "true", "loss_type": "ppo_clip"}
    elif built.weight is not None:
        setting = built.weight.peers()["verl"]
        found, remarks = dict(setting.options), [*setting.remarks]
    rules: dict[str, list[str]] = {}
    for setting in _masks(built, "verl"):
        remarks += setting.remarks
        for key, value in setting.options.items():
            rules.setdefault(key, []).append(value)
    for key, values in rules.items():
        found[key] = values[0] if len(values) == 1 else f'"{",".join(value.strip(chr(34)) for value in values)}"'
    if rules and built.ratio.over == "behavior":
        remarks.append("# in bypass mode verl judges π/μ, not π_old/μ")
    return found, remarks


def _verl_actor(built: Objective) -> dict[str, str]:
    aggregation = built.aggregation
    found = {}
    if aggregation.kind != "token-mean":
        found["loss_agg_mode"] = aggregation.kind.replace("constant", "seq-mean-token-sum-norm")
    if aggregation.length_max is not None:
        found["loss_scale_factor"] = str(aggregation.length_max)
    return found | dict(_surrogate(built, "verl").options)


def _trl(built: Objective) -> list[str]:
    loss = {"token-mean": "dapo", "seq-mean-token-mean": "grpo", "constant": "dr_grpo"}.get(built.aggregation.kind)
    own, weight = _surrogate(built, "TRL"), built.weight
    options = {"vllm_importance_sampling_correction": str(weight is not None)}
    settings = [*([] if weight is None else [weight.peers()["TRL"]]), *_masks(built, "TRL")]
    remarks = [remark for setting in settings for remark in setting.remarks]
    for setting in settings:
        options |= setting.options
    if loss is None:
        remarks.append(f"# TRL has no equivalent of aggregation {built.aggregation.kind}")
    else:
        options["loss_type"] = json.dumps(loss)
    options |= own.options
    if built.advantage == "dr-grpo":
        options["scale_rewards"] = "False"
    body = [f"    {key}={value}," for key, value in options.items()]
    return ["GRPOConfig(", "    use_vllm=True,", *body, ")", *remarks, *own.remarks]


def _miles(built: Objective) -> list[str]:
    own, weight = _surrogate(built, "Miles"), built.weight
    found = [f"--advantage-estimator {'gspo' if built.ratio.level == 'geometric' else 'grpo'}"]
    found += ["--calculate-per-token-loss"] if built.aggregation.kind == "token-mean" else []
    found += [*_flags(own), *own.remarks]
    if built.advantage == "dr-grpo":
        found += ["--disable-grpo-std-normalization", "# its constant denominator is examples/experimental/DrGRPO"]
    helper: dict[str, str] = {}
    for setting in _masks(built, "Miles"):
        found += [*_flags(setting), *setting.remarks]
        helper |= _keys(setting)
    if built.ratio.over == "behavior":
        found.append("--use-rollout-logprobs")
    if weight is None:
        return [*found, *(["# Miles' mismatch helper rejects beside a weight only"] if helper else [])]
    own = weight.peers()["Miles"]
    built_in = _flags(own)
    return [
        *found,
        *(built_in if built_in and not helper else _miles_helper({**_keys(own), "use_rs": "false"}, helper)),
    ]


def _flags(setting: Setting) -> list[str]:
    return [f"{key} {value}".rstrip() for key, value in setting.options.items() if key.startswith("--")]


def _keys(setting: Setting) -> dict[str, str]:
    return {key: value for key, value in setting.options.items() if not key.startswith("--")}


def _miles_helper(weight: Mapping[str, str], rules: Mapping[str, str]) -> list[str]:
    """The mismatch helper of its examples, with a file of its own."""
    absent = dict.fromkeys(("rs_lower_bound", "rs_upper_bound", "rs_veto_threshold"), "null")
    given = {**weight, **rules}
    settings = given | {key: value for key, value in absent.items() if key not in given}
    return [
        "--use-tis",
        f"--custom-tis-function-path {MIS}",
        "--custom-config-path mis.yaml",
        "# mis.yaml",
        *(f"{key}: {value}" for key, value in settings.items()),
    ]
