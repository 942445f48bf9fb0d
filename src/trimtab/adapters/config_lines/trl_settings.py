"""An objective as arguments of TRL's `GRPOConfig`, and of two configurations of its experiments."""

from __future__ import annotations

import json
from collections.abc import Mapping

from trimtab.adapters.config_lines.own_settings import (
    UNBOUNDED,
    Absent,
    Settings,
    no_mask,
    no_term,
    no_weight,
    unset_remarks,
)
from trimtab.corrections import OPSM, Mask, Weight
from trimtab.objectives import Clipped, GammaWeight, GeometricClip, Objective, Reinforce, SoftGate

LOSSES = {"token-mean": "dapo", "seq-mean-token-mean": "grpo", "constant": "dr_grpo"}
"""TRL's `loss_type` of a clipped ratio by the aggregation."""
AGGREGATIONS = {"cispo": "token-mean", "vespo": "token-mean", "sapo": "seq-mean-token-mean"}
"""The aggregation of TRL's other loss types."""


def trl(built: Objective) -> list[str]:
    remarks = unset_remarks(built, "TRL")
    if built.ratio.over == "behavior" and not isinstance(built.surrogate, GammaWeight):
        return [*_trl_async(built), *remarks]
    surrogate = _surrogate(built)
    weights = [] if built.weight is None else [_weight(built.weight)]
    corrections = [*weights, *map(_mask, built.masks)]
    settings = (*corrections, surrogate)
    remarks += [remark for one in settings for remark in one.remarks]
    options = {"vllm_importance_sampling_correction": str(built.weight is not None)}
    for one in settings:
        options |= one.options
    kind = built.aggregation.kind
    if isinstance(built.surrogate, GeometricClip):
        if corrections or kind != "seq-mean-token-mean":
            raise Absent("no geometric mean of clipped ratios with these parts")
        return [_call("trl.experimental.gmpo.GMPOConfig", options), *remarks]
    loss = options.get("loss_type", json.dumps(LOSSES.get(kind))).strip('"')
    if AGGREGATIONS.get(loss, kind) != kind or loss == "null":
        raise Absent(f"no aggregation {kind} of this loss")
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
        raise Absent("GRPOTrainer's ratio is π/π_old, AsyncGRPOTrainer's is clipped per token without a dual clip")
    options = {"epsilon": repr(clip.low), "epsilon_high": repr(clip.high)}
    return [
        _call("trl.experimental.async_grpo.AsyncGRPOConfig", options),
        "# of AsyncGRPOTrainer, with gradient_accumulation_steps=1; GRPOTrainer has no ratio π/μ",
    ]


def _call(name: str, options: Mapping[str, str]) -> str:
    sampler = [] if "Async" in name else ["    use_vllm=True,"]
    return "\n".join([f"{name}(", *sampler, *(f"    {key}={value}," for key, value in options.items()), ")"])


def _surrogate(built: Objective) -> Settings:
    part, level = built.surrogate, built.ratio.level
    if isinstance(part, Clipped) and level in ("token", "geometric"):  # None clips the product of a response.
        options, remarks = {"epsilon": repr(part.low), "epsilon_high": repr(part.high)}, ()
        if level == "geometric":
            options["importance_sampling_level"] = '"sequence"'
        if part.dual is not None:
            options["delta"] = repr(part.dual)
            remarks = ("# differs: TRL's delta caps the ratio where A > 0 too",) if part.dual < 1 + part.high else ()
        return Settings(options, remarks)
    if isinstance(part, GammaWeight) and level == "sequence":
        names = ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")
        values = (part.k1_positive, part.k2_positive, part.k1_negative, part.k2_negative)
        # The product current/sampler is that of TRL's correction, unbounded.
        weight = {"correction": "True", "mode": '"token_truncate"', "clip_max": "1e9"}
        weight = {f"vllm_importance_sampling_{key}": value for key, value in weight.items()}
        return Settings({"loss_type": '"vespo"', **weight, **dict(zip(names, map(repr, values), strict=True))})
    if level != "token":
        raise no_term(built)
    if isinstance(part, Reinforce):
        return Settings({"loss_type": '"cispo"', "epsilon_high": repr(min(part.ceiling, UNBOUNDED))})
    if isinstance(part, SoftGate):
        options = {"sapo_temperature_pos": repr(part.positive), "sapo_temperature_neg": repr(part.negative)}
        return Settings({"loss_type": '"sapo"', **options})
    if isinstance(part, GeometricClip):
        return Settings({"epsilon": repr(part.low), "epsilon_high": repr(part.high)})
    raise no_term(built)


def _weight(weight: Weight) -> Settings:
    if weight.level not in ("token", "sequence") or weight.over == "current":
        raise no_weight(weight)
    form, key = "mask" if weight.bound == "mask" else "truncate", "vllm_importance_sampling"
    options = {f"{key}_mode": f'"{weight.level}_{form}"', f"{key}_clip_max": repr(weight.high)}
    options |= {f"{key}_clip_min": repr(weight.low)} if weight.low > 0 else {}
    return Settings(options, ("# differs: TRL does not normalize the weights",) if weight.normalize else ())


def _mask(rule: Mask) -> Settings:
    if isinstance(rule, OPSM) and rule.sign == "negative":
        return Settings({"off_policy_mask_threshold": repr(rule.delta)})
    raise no_mask(rule)
