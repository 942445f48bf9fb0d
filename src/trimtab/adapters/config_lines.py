"""Renders an objective as configuration of Trimtab and of other trainers.

For verl and TRL these are the trainer's own settings where its own loss is this one; otherwise, and for every other
trainer, the lines of its adapter. Option names are those of verl 0.9.1 and TRL 1.16, in which the lines are run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from trimtab.adapters.adapter_lines import ACTOR, ALGORITHM, adapter_lines, assignment, verl_aggregation, written
from trimtab.adapters.hooks import HOOKS, OWN_RUN, hook
from trimtab.corrections import OPSM, Weight
from trimtab.errors import TrimtabError, did_you_mean
from trimtab.objectives import Clipped, LogProb, Objective, Reinforce, SoftGate, objective
from trimtab.objectives.calibrate import bounds_of

CORRECTION = f"{ALGORITHM}.rollout_correction"
UNBOUNDED = 1e9
"""In place of no bound where a framework must have one: above the largest ratio, e^20."""
VERL_LOWEST = 1e-6
"""Written for a lower bound of 0, which verl's IcePop form requires to be above 0."""

Options = dict[str, str]
"""Settings as written in the configuration of a trainer."""


def lines(preset: str, overrides: Mapping[str, Any]) -> dict[str, str]:
    """Returns configuration by framework: trimtab (TOML), verl (overrides), trl (Python), miles (flags, and YAML).

    preset, overrides: as for `trimtab.objective`, custom functions (`module:function`) included. Raises `TrimtabError`
    for unknown presets and keywords.
    """
    return {name: lines_for(name, preset, overrides) for name in ("trimtab", "verl", "trl", "miles")}


def lines_for(trainer: str, preset: str, overrides: Mapping[str, Any]) -> str:
    """Returns the configuration of one trainer, a key of `hooks.HOOKS` or `trimtab`; a comment where it has none.

    Raises `TrimtabError` for unknown trainers, presets and keywords.
    """
    known = ["trimtab", *HOOKS]
    if trainer not in known:
        raise TrimtabError(f"unknown trainer {trainer!r}{did_you_mean(trainer, known)}")
    built = objective(preset, **overrides)
    if trainer == "trimtab":
        return _trimtab(preset, overrides)
    plain = preset not in OWN_RUN and not built.centering and built.kl.coef == built.entropy_coef == 0
    own = _OWN[trainer](built) if trainer in _OWN and plain else None
    if own is not None:
        return "\n".join(own)
    rows, refusal = adapter_lines(trainer, preset, overrides, built)
    if refusal and trainer == "trl":
        rows, of_async = adapter_lines("trl-async", preset, overrides, built)
        refusal = of_async and refusal
    if refusal:
        return f"# {hook(trainer).trainer} cannot train {preset}: {refusal}"
    return "\n".join(["# with Trimtab's adapter (docs/adapters.md):", *rows])


def _trimtab(preset: str, overrides: Mapping[str, Any]) -> str:
    given = {"name": preset, **{key: value for key, value in overrides.items() if value is not None}}
    rows = ["[objective]", *(f"{key} = {written(value, 'toml')}" for key, value in given.items())]
    bounds = bounds_of(preset)
    if bounds and set(bounds) <= set(overrides):
        rows.append(f"# or, in place of {', '.join(bounds)}: calibrate = true")
    return "\n".join(rows)


def _verl(built: Objective) -> list[str] | None:
    """Returns overrides of Hydra, or None. For π/μ verl takes the sampler's log-probs for those at the start."""
    term, weight = _verl_term(built), _verl_weight(built.weight)
    # verl takes what a mask rejects out of its denominators, and counts what a weight rejects.
    if term is None or weight is None or built.masks or built.aggregation.denominator == "kept":
        return None
    if built.ratio.over == "behavior":
        if "loss_mode" in term:
            return None
        weight = {"bypass_mode": "True"}
    options = {f"{CORRECTION}.{key}": value for key, value in weight.items()}
    options["actor_rollout_ref.rollout.calculate_log_probs"] = "True"
    options |= {f"{ACTOR}.{'policy_loss.' if key == 'loss_mode' else ''}{key}": value for key, value in term.items()}
    return [assignment(key, value) for key, value in (options | verl_aggregation(built)).items()]


def _verl_term(built: Objective) -> Options | None:
    part, level, kind = built.surrogate, built.ratio.level, built.aggregation.kind
    by_sequence = kind == "seq-mean-token-mean"  # verl's gspo and sapo aggregate so, whatever loss_agg_mode says
    if kind == "trained-mean-token-sum":
        return None
    if isinstance(part, LogProb):
        return {"loss_mode": "gpg"}
    if isinstance(part, Clipped) and (level == "token" or (level == "geometric" and by_sequence and not part.dual)):
        bounds = {"clip_ratio_low": f"{part.low:g}", "clip_ratio_high": f"{part.high:g}"}
        if level == "geometric":
            return {"loss_mode": "gspo", **bounds}
        # verl always has a dual clip.
        return {**bounds, "clip_ratio_c": f"{part.dual or UNBOUNDED:g}"}
    if isinstance(part, Reinforce) and level == "token":
        ceiling = min(part.ceiling, UNBOUNDED)
        return {"loss_mode": "cispo", "clip_ratio_low": "1.0", "clip_ratio_high": f"{ceiling - 1:.10g}"}
    if isinstance(part, SoftGate) and level == "token" and by_sequence:
        return {"loss_mode": "sapo", "tau_pos": f"{part.positive:g}", "tau_neg": f"{part.negative:g}"}
    return None


def _verl_weight(weight: Weight | None) -> Options | None:
    if weight is None:
        return {"rollout_is": "null"}
    if weight.level not in ("token", "sequence") or weight.bound == "clip":
        return None
    threshold = f"{weight.high:g}"
    if weight.bound == "mask":
        # In quotes: Hydra and YAML read 0.5_5 as the number 0.55.
        threshold = f'"{max(weight.low, VERL_LOWEST):g}_{weight.high:g}"'
    normalize = {"rollout_is_batch_normalize": "true"} if weight.normalize else {}
    return {"rollout_is": weight.level, "rollout_is_threshold": threshold, **normalize}


TRL_LOSSES = {"token-mean": "dapo", "seq-mean-token-mean": "grpo", "constant": "dr_grpo"}
"""TRL's `loss_type` of a clipped ratio by the aggregation."""


def _trl(built: Objective) -> list[str] | None:
    """Returns a call of `GRPOConfig`, or of `AsyncGRPOConfig` for a ratio π/μ, or None."""
    if built.ratio.over == "behavior":
        return _trl_async(built)
    term, weight = _trl_term(built), _trl_weight(built.weight)
    if term is None or weight is None or built.aggregation.denominator == "kept":
        return None
    options, remarks = {**weight, **term}, []
    match built.masks:
        case ():
            pass
        case (OPSM(delta=delta, sign="negative"),):
            options["off_policy_mask_threshold"] = repr(delta)
        case _:
            return None
    if built.aggregation.length_max is not None:
        options["max_completion_length"] = str(built.aggregation.length_max)
        remarks = ["# max_completion_length is the constant length, and the limit of generation too"]
    if built.advantage == "dr-grpo":
        options["scale_rewards"] = '"none"'
    return [_call("GRPOConfig", {"use_vllm": "True", **options}), *remarks]


def _trl_term(built: Objective) -> Options | None:
    part, level, kind = built.surrogate, built.ratio.level, built.aggregation.kind
    if isinstance(part, Clipped) and level in ("token", "geometric") and kind in TRL_LOSSES:
        options = {"loss_type": json.dumps(TRL_LOSSES[kind])}
        options |= {"epsilon": repr(part.low), "epsilon_high": repr(part.high)}
        if level == "geometric":
            options["importance_sampling_level"] = '"sequence"'
        if part.dual is None:
            return options
        # TRL's delta caps the ratio where A > 0 too, where the upper clip must act first.
        return options | {"delta": repr(part.dual)} if part.dual >= 1 + part.high else None
    if isinstance(part, Reinforce) and (level, kind) == ("token", "token-mean"):
        return {"loss_type": '"cispo"', "epsilon_high": repr(min(part.ceiling, UNBOUNDED))}
    if isinstance(part, SoftGate) and (level, kind) == ("token", "seq-mean-token-mean"):
        temperatures = {"sapo_temperature_pos": repr(part.positive), "sapo_temperature_neg": repr(part.negative)}
        return {"loss_type": '"sapo"', **temperatures}
    return None


def _trl_weight(weight: Weight | None) -> Options | None:
    key = "vllm_importance_sampling"
    if weight is None:
        return {f"{key}_correction": "False"}
    if weight.level not in ("token", "sequence") or weight.normalize:
        return None
    form = "mask" if weight.bound == "mask" else "truncate"
    options = {f"{key}_correction": "True", f"{key}_mode": f'"{weight.level}_{form}"'}
    options[f"{key}_clip_max"] = repr(weight.high)
    return options | ({f"{key}_clip_min": repr(weight.low)} if weight.low > 0 else {})


def _trl_async(built: Objective) -> list[str] | None:
    """Returns the call for `AsyncGRPOTrainer`, whose loss clips current/sampler; `GRPOTrainer` has no such ratio."""
    clip, kind = built.surrogate, built.aggregation.kind
    if built.masks or (built.ratio.level, kind) != ("token", "token-mean"):
        return None
    if not isinstance(clip, Clipped) or clip.dual is not None:
        return None
    options = {"epsilon": repr(clip.low), "epsilon_high": repr(clip.high)}
    return [
        _call("trl.experimental.async_grpo.AsyncGRPOConfig", options),
        "# of AsyncGRPOTrainer, with gradient_accumulation_steps=1; GRPOTrainer has no ratio π/μ",
    ]


def _call(name: str, options: Options) -> str:
    return "\n".join([f"{name}(", *(f"    {key}={value}," for key, value in options.items()), ")"])


_OWN: dict[str, Callable[[Objective], list[str] | None]] = {"verl": _verl, "trl": _trl}
