"""Renders an objective as configuration of Trimtab and of other trainers, from the settings of its parts.

First come the trainer's own settings, where its own loss is this one, or nearly: a comment that begins with "differs"
says how it is not. Where it has none, its adapter's lines, or those of the nearest preset. Option names are those of
verl 0.9.1, TRL 1.16 and Miles 31f1ca96; the lines of the first two are run (docs/choosing.md).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from trimtab.adapters.adapter_lines import ACTOR, ALGORITHM, adapter_lines, assignment, verl_aggregation, written
from trimtab.adapters.hooks import HOOKS, OWN_RUN, hook
from trimtab.corrections import Setting
from trimtab.corrections.masks import Divergence
from trimtab.errors import TrimtabError, did_you_mean
from trimtab.objectives import Objective, objective
from trimtab.objectives.calibrate import bounds_of
from trimtab.objectives.smooth_surrogates import GammaWeight, GeometricClip
from trimtab.objectives.surrogates import Clipped, Reinforce

MIS = "examples.infra_features.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp"
CORRECTION = f"{ALGORITHM}.rollout_correction"
UNBOUNDED = 1e9
"""In place of no bound where a framework must have one: above the largest ratio, e^20."""

NEAREST = {
    "token-alp": ("token-alp-bypass", "without noise in the model"),
    "seq-alp": ("seq-bypass", "without noise in the model"),
    "soup": ("token-bypass", "the policy that trains begins every response"),
    "m2po": ("token-bypass", "it clips each token's ratio, where m2po bounds the second moment of the whole update"),
    "a3po": ("token-bypass", "its bounds are the same for tokens of every age"),
    "score-centering": ("token-bypass", "it clips ratios and centers nothing"),
}
"""The most similar preset of a trainer that has neither the loss nor an adapter that carries it, and how it differs."""


class _Absent(Exception):
    """A framework's own losses lack a part of the objective; the message says which, and continues `: `."""


def lines(preset: str, overrides: Mapping[str, Any]) -> dict[str, str]:
    """Returns configuration by framework: trimtab (TOML), verl (overrides), trl (Python), miles (flags, and YAML).

    preset, overrides: as for `trimtab.objective`, custom functions (`module:function`) included. Raises `TrimtabError`
    for unknown presets and keywords.
    """
    return {name: lines_for(name, preset, overrides) for name in ("trimtab", "verl", "trl", "miles")}


def lines_for(trainer: str, preset: str, overrides: Mapping[str, Any]) -> str:
    """Returns the configuration of one trainer, a key of `hooks.HOOKS` or `trimtab`, with what differs as comments.

    Raises `TrimtabError` for unknown trainers, presets and keywords.
    """
    known = ["trimtab", *HOOKS]
    if trainer not in known:
        raise TrimtabError(f"unknown trainer {trainer!r}{did_you_mean(trainer, known)}")
    built = objective(preset, **overrides)
    if trainer == "trimtab":
        return _trimtab(preset, overrides)
    reason = ""
    if trainer in _OWN and preset not in OWN_RUN:
        try:
            own = _OWN[trainer](built)
        except _Absent as absent:
            reason = f": {absent}"
        else:
            return "\n".join([*own, *_exactly(trainer, preset, overrides, built, own)])
    return "\n".join(_elsewhere(trainer, preset, overrides, built, reason))


def _exactly(trainer: str, preset: str, overrides: Mapping[str, Any], built: Objective, own: list[str]) -> list[str]:
    """Returns what has exactly this loss where a trainer's own settings differ, as comments."""
    if not any(row.startswith("# differs") for row in own):
        return []
    rows, refusal = adapter_lines(trainer, preset, overrides, built)
    title = "# exactly this loss, with Trimtab's adapter (docs/adapters.md):"
    return [] if refusal else [title, *(row if row.startswith("#") else f"# {row}" for row in rows)]


def _elsewhere(trainer: str, preset: str, overrides: Mapping[str, Any], built: Objective, reason: str) -> list[str]:
    """Returns the lines of the trainer's adapter; where it refuses, those of the nearest preset, with the reason."""
    name = hook(trainer).trainer
    for candidate in (trainer, *(["trl-async"] if trainer == "trl" else [])):
        rows, refusal = adapter_lines(candidate, preset, overrides, built)
        if refusal is None:
            own = f"# {name}'s own losses lack {preset}{reason}" if trainer in _OWN else ""
            return [*([own] if own else []), "# with Trimtab's adapter (docs/adapters.md):", *rows]
    refusal = OWN_RUN.get(preset, adapter_lines(trainer, preset, overrides, built)[1])
    cannot = f"# {name} cannot train {preset}, with Trimtab's adapter or without it: {refusal}"
    if preset not in NEAREST:
        return [cannot]
    nearest, differs = NEAREST[preset]
    kept = {"clip_high": built.surrogate.high} if preset == "soup" and isinstance(built.surrogate, Clipped) else {}
    shared = {**kept, **{key: value for key, value in overrides.items() if key in bounds_of(nearest)}}
    return [cannot, f"# differs: nearest is {nearest}; {differs}:", lines_for(trainer, nearest, shared)]


def _trimtab(preset: str, overrides: Mapping[str, Any]) -> str:
    given = {"name": preset, **{key: value for key, value in overrides.items() if value is not None}}
    rows = ["[objective]", *(f"{key} = {written(value, 'toml')}" for key, value in given.items())]
    bounds = bounds_of(preset)
    if bounds and set(bounds) <= set(overrides):
        rows.append(f"# or, in place of {', '.join(bounds)}: calibrate = true")
    return "\n".join(rows)


def _part(setting: Setting | None, what: str) -> Setting:
    """Returns the setting of a part in a framework. Raises `_Absent` where there is none."""
    if setting is None or not (setting.options or "differs" in "".join(setting.remarks)):
        raise _Absent(setting.remarks[0].removeprefix("# ") if setting and setting.remarks else f"no {what}")
    return setting


def _surrogate(built: Objective, name: str) -> Setting:
    return _part(built.surrogate.peers(built.ratio.level).get(name), f"term {built.surrogate.equation('r')}")


def _corrections(built: Objective, name: str) -> list[Setting]:
    """Returns the settings of the weight and the masks. Raises `_Absent` where one has none."""
    weight = [] if built.weight is None else [_part(built.weight.peers().get(name), "such weight")]
    return [*weight, *(_part(rule.peers().get(name), f"mask: keep where {rule.equation()}") for rule in built.masks)]


def _others(built: Objective, name: str) -> list[str]:
    """Returns remarks on what no line carries."""
    remarks = []
    if built.kl.coef > 0 or built.entropy_coef > 0:
        remarks.append(f"# differs: kl_coef and entropy_coef are left out: set {name}'s own")
    if built.aggregation.denominator == "kept" and (built.weight is not None or (built.masks and name != "verl")):
        remarks.append(f"# differs: {name} counts rejected tokens and sequences in its denominators as it does")
    if built.centering:
        raise _Absent("no centered scores")
    return remarks


def _verl(built: Objective) -> list[str]:
    """Returns overrides of Hydra. What reads π/μ takes the sampler's log-probs for those at the start: bypass_mode."""
    remarks, bypass = _others(built, "verl"), built.ratio.over == "behavior"
    options = {f"{CORRECTION}.rollout_is": "null"}
    if bypass:
        if built.weight is not None:
            raise _Absent("no weight beside π/μ")
        options = {f"{CORRECTION}.bypass_mode": "True"}
        actor = _dppo(built) if built.masks else dict(_surrogate(built, "verl").options)
        if "loss_mode" in actor:
            remarks.append("# with verl's trainer V1, its default; v0 replaces the loss in bypass_mode")
    else:
        surrogate, corrections = _surrogate(built, "verl"), _corrections(built, "verl")
        actor = dict(surrogate.options)
        remarks += [remark for one in (surrogate, *corrections) for remark in one.remarks]
        joined: dict[str, list[str]] = {}
        for one in corrections:
            for key, value in one.options.items():
                joined.setdefault(key, []).append(value.strip('"'))
        # Several rules share one key.
        options |= {f"{CORRECTION}.{key}": _quoted(",".join(values)) for key, values in joined.items()}
        if built.masks and not _verl_denominators(built):
            remarks.append("# differs: verl leaves rejected tokens out of the denominators, and counts every sequence")
    if actor.get("loss_mode") == "sapo" and built.aggregation.kind != "seq-mean-token-mean":
        remarks.append("# differs: verl's sapo aggregates by seq-mean-token-mean, whatever loss_agg_mode says")
    options["actor_rollout_ref.rollout.calculate_log_probs"] = "True"
    modes = {f"{ACTOR}.{'policy_loss.' if key == 'loss_mode' else ''}{key}": value for key, value in actor.items()}
    return [assignment(key, value) for key, value in (options | modes | verl_aggregation(built)).items()] + remarks


def _verl_denominators(built: Objective) -> bool:
    """Whether verl, which takes rejected tokens out of its mask and counts every sequence, divides as the objective."""
    kind, original = built.aggregation.kind, built.aggregation.denominator == "original"
    if kind == "token-mean":
        return not original
    whole = all(getattr(rule, "level", getattr(rule, "reduce", "")) != "token" for rule in built.masks)
    return original and (whole or kind != "seq-mean-token-mean")


def _quoted(text: str) -> str:
    """Returns a value in the grammar of Hydra, which reads 0.5_5 as the number 0.55, and a comma as a choice."""
    return f'"{text}"' if re.search(r"\d_\d|,", text) else text


def _dppo(built: Objective) -> dict[str, str]:
    """Returns the settings of the actor for the masks that verl has over π/μ."""
    losses = {"binary_tv": "dppo_tv", "binary_kl": "dppo_kl"}
    [rule, *more] = built.masks
    if not (
        isinstance(rule, Divergence)
        and isinstance(built.surrogate, Reinforce)
        and (rule.over, rule.reduce, rule.outward) == ("current", "token", True)
        and rule.kind in losses
        and not more
    ):
        raise _Absent(f"no mask over π/μ: keep where {built.masks[0].equation()}")
    bound = f"{rule.max:g}"
    ceiling = f"{min(built.surrogate.ceiling, UNBOUNDED):g}"
    return {
        "loss_mode": losses[rule.kind],
        "clip_ratio_low": bound,
        "clip_ratio_high": bound,
        "clip_ratio_c": ceiling,
    }


TRL_LOSSES = {"token-mean": "dapo", "seq-mean-token-mean": "grpo", "constant": "dr_grpo"}
"""TRL's `loss_type` of a clipped ratio by the aggregation."""
TRL_AGGREGATIONS = {"cispo": "token-mean", "vespo": "token-mean", "sapo": "seq-mean-token-mean"}
"""The aggregation of TRL's other loss types."""


def _trl(built: Objective) -> list[str]:
    remarks = _others(built, "TRL")
    if built.ratio.over == "behavior" and not isinstance(built.surrogate, GammaWeight):
        return [*_trl_async(built), *remarks]
    surrogate, corrections = _surrogate(built, "TRL"), _corrections(built, "TRL")
    settings = (*corrections, surrogate)
    remarks += [remark for one in settings for remark in one.remarks]
    options = {"vllm_importance_sampling_correction": str(built.weight is not None)}
    for one in settings:
        options |= one.options
    kind = built.aggregation.kind
    if isinstance(built.surrogate, GeometricClip):
        if corrections or kind != "seq-mean-token-mean":
            raise _Absent("no geometric mean of clipped ratios with these parts")
        return [_call("trl.experimental.gmpo.GMPOConfig", options), *remarks]
    loss = options.get("loss_type", json.dumps(TRL_LOSSES.get(kind))).strip('"')
    if TRL_AGGREGATIONS.get(loss, kind) != kind or loss == "null":
        raise _Absent(f"no aggregation {kind} of this loss")
    options["loss_type"] = json.dumps(loss)
    if built.aggregation.length_max is not None:
        options["max_completion_length"] = str(built.aggregation.length_max)
        remarks.append("# max_completion_length is the constant length, and the limit of generation too")
    if built.advantage == "dr-grpo":
        options["scale_rewards"] = '"none"'
    return [_call("GRPOConfig", options), *remarks]


def _trl_async(built: Objective) -> list[str]:
    """Returns the lines of `AsyncGRPOTrainer`, whose loss clips current/sampler; `GRPOTrainer` has no such ratio."""
    clip = built.surrogate
    only = built.ratio.level == "token" and built.weight is None and not built.masks
    if not (isinstance(clip, Clipped) and only and clip.dual is None and built.aggregation.kind == "token-mean"):
        raise _Absent("GRPOTrainer's ratio is π/π_old, AsyncGRPOTrainer's is clipped per token without a dual clip")
    options = {"epsilon": repr(clip.low), "epsilon_high": repr(clip.high)}
    return [
        _call("trl.experimental.async_grpo.AsyncGRPOConfig", options),
        "# of AsyncGRPOTrainer, with gradient_accumulation_steps=1; GRPOTrainer has no ratio π/μ",
    ]


def _call(name: str, options: Mapping[str, str]) -> str:
    sampler = [] if "Async" in name else ["    use_vllm=True,"]
    return "\n".join([f"{name}(", *sampler, *(f"    {key}={value}," for key, value in options.items()), ")"])


def _miles(built: Objective) -> list[str]:
    surrogate, corrections, weight = _surrogate(built, "Miles"), _corrections(built, "Miles"), built.weight
    rows = [f"--advantage-estimator {'gspo' if built.ratio.level == 'geometric' else 'grpo'}"]
    rows += ["--calculate-per-token-loss"] if built.aggregation.kind == "token-mean" else []
    rows += [*_flags(surrogate), *surrogate.remarks]
    if built.advantage == "dr-grpo":
        rows += ["--disable-grpo-std-normalization"]
    if built.aggregation.kind not in ("token-mean", "seq-mean-token-mean"):
        rows += [f"# differs: no aggregation {built.aggregation.kind}; examples/experimental/DrGRPO has a constant one"]
    helper: dict[str, str] = {}
    for setting in corrections[0 if weight is None else 1 :]:
        rows += [*_flags(setting), *setting.remarks]
        helper |= _keys(setting)
    if built.ratio.over == "behavior":
        rows.append("--use-rollout-logprobs")
    remarks = _others(built, "Miles")
    if weight is None:
        return [
            *rows,
            *(["# differs: Miles' mismatch helper rejects beside a weight only"] if helper else []),
            *remarks,
        ]
    setting = corrections[0]
    built_in = _flags(setting)
    if built_in and not helper:
        return [*rows, *built_in, *remarks]
    settings = {**_keys(setting), "use_rs": "false", **helper}
    for key in ("rs_lower_bound", "rs_upper_bound", "rs_veto_threshold"):
        settings.setdefault(key, "null")
    # Flags and configuration file of the mismatch helper in Miles' examples.
    rows += ["--use-tis", f"--custom-tis-function-path {MIS}", "--custom-config-path mis.yaml", *remarks, "# mis.yaml"]
    return [*rows, *(f"{key}: {value}" for key, value in settings.items())]


def _flags(setting: Setting) -> list[str]:
    return [f"{key} {value}".rstrip() for key, value in setting.options.items() if key.startswith("--")]


def _keys(setting: Setting) -> dict[str, str]:
    return {key: value for key, value in setting.options.items() if not key.startswith("--")}


_OWN: dict[str, Callable[[Objective], list[str]]] = {"verl": _verl, "trl": _trl, "miles": _miles}
