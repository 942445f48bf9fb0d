"""Renders an objective as settings of verl's, TRL's and Miles' own losses; raises `Absent` if these lack a part.

verl: Hydra overrides of its losses and its rollout correction. TRL: arguments of `GRPOConfig`, or of `GMPOConfig` in
`trl.experimental`. Miles: flags, and the YAML file of the mismatch helper in its examples.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from trimtab.adapters.config_lines.adapter_lines import ACTOR, ALGORITHM, assignment, verl_aggregation, written
from trimtab.corrections import OPSM, Band, Divergence, Mask, Veto, Weight
from trimtab.objectives import Clipped, GammaWeight, GeometricClip, LogProb, Objective, Reinforce, SoftGate

UNBOUNDED = 1e9
"""Written for "no bound" if a framework requires a number: above the largest ratio, e^20."""
LEVELS = ("token", "sequence", "geometric")
"""Levels of weights and bands that other trainers have."""
CORRECTION = f"{ALGORITHM}.rollout_correction"
LOWEST = 1e-6
"""Written for a lower bound of 0: verl's form of IcePop requires a lower bound, and verl refuses 0."""
TRL_LOSSES = {"token-mean": "dapo", "seq-mean-token-mean": "grpo", "constant": "dr_grpo"}
"""Aggregation -> TRL's `loss_type` of a clipped ratio."""
TRL_AGGREGATIONS = {"cispo": "token-mean", "vespo": "token-mean", "sapo": "seq-mean-token-mean"}
"""TRL's other values of `loss_type` -> their aggregation."""
ICEPOP = "miles.backends.training_utils.loss_hub.corrections.icepop_function"
MIS = "examples.infra_features.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp"
_python, _yaml = partial(written, language="python"), partial(written, language="yaml")


class Settings(NamedTuple):
    """How another trainer sets one part of an objective.

    options: key -> value as written in the trainer's configuration; a flag has an empty value. Keys of verl are those
    of `rollout_correction` (weights, masks) or `actor` (surrogates), keys of TRL are arguments of `GRPOConfig`, keys of
    Miles are flags, or keys of its mismatch helper's file. remarks: comments on what differs there.
    """

    options: dict[str, str]
    remarks: tuple[str, ...] = ()


class Absent(Exception):
    """Raised if a framework's own losses lack a part of the objective; the message names that part."""


def no_term(built: Objective) -> Absent:
    return Absent(f"no term {built.surrogate.equation('r')}")


def no_mask(rule: Mask) -> Absent:
    return Absent(f"no mask that keeps where {rule.equation()}")


def corrections(
    built: Objective, levels: Sequence[str], render: Callable[[Weight], Settings], mask: Callable[[Mask], Settings]
) -> list[Settings]:
    """Returns the settings of the weight, from the function `render`, then of each mask, from the function `mask`.

    levels: those of the weights that the trainer has.
    """
    weight = built.weight
    if weight is not None and (weight.level not in levels or weight.over == "current"):
        raise Absent(f"no weight {weight.equation()}{', w = π/μ' if weight.over == 'current' else ''}")
    return [*([] if weight is None else [render(weight)]), *map(mask, built.masks)]


def unset_remarks(built: Objective, name: str) -> list[str]:
    """Returns remarks on parts of the objective that no line sets. Raises `Absent` for centered scores."""
    remarks = []
    if built.kl.coef > 0 or built.entropy_coef > 0:
        remarks.append(f"# differs: kl_coef and entropy_coef are left out: set {name}'s own")
    if built.aggregation.denominator == "kept" and (built.weight is not None or (built.masks and name != "verl")):
        remarks.append(f"# differs: {name} counts rejected tokens and sequences in its denominators as it does")
    if built.centering:
        raise Absent("no centered scores")
    return remarks


def verl(built: Objective) -> list[str]:
    """Returns Hydra overrides. For ratios π/μ they set bypass_mode: the sampler's log-probs then stand for π_old's."""
    bypass = built.ratio.over == "behavior"
    if bypass and built.weight is not None:
        raise Absent("no weight beside π/μ")
    surrogate = Settings(_verl_dppo(built)) if bypass and built.masks else _verl_surrogate(built)
    given = [] if bypass else corrections(built, ("token", "sequence"), _verl_weight, _verl_mask)
    actor, remarks = surrogate.options, unset_remarks(built, "verl")
    remarks += [remark for one in (surrogate, *given) for remark in one.remarks]
    if bypass and "loss_mode" in actor:
        remarks.append("# with verl's trainer V1, its default; v0 replaces the loss in bypass_mode")
    if given and built.masks and not _verl_denominators(built):
        remarks.append("# differs: verl leaves rejected tokens out of the denominators, and counts every sequence")
    options = {f"{CORRECTION}.bypass_mode": "True"} if bypass else {f"{CORRECTION}.rollout_is": "null"}
    joined: dict[str, list[str]] = {}  # Several rules share one key.
    for one in given:
        for key, value in one.options.items():
            joined.setdefault(key, []).append(value.strip('"'))
    options |= {f"{CORRECTION}.{key}": _quoted(",".join(values)) for key, values in joined.items()}
    if actor.get("loss_mode") == "sapo" and built.aggregation.kind != "seq-mean-token-mean":
        remarks.append("# differs: verl's sapo aggregates by seq-mean-token-mean, whatever loss_agg_mode says")
    options["actor_rollout_ref.rollout.calculate_log_probs"] = "True"
    modes = {f"{ACTOR}.{'policy_loss.' if key == 'loss_mode' else ''}{key}": value for key, value in actor.items()}
    return [assignment(key, value) for key, value in (options | modes | verl_aggregation(built)).items()] + remarks


def _verl_denominators(built: Objective) -> bool:
    """Returns whether verl divides as the objective does; verl leaves rejected tokens out and counts every sequence."""
    kind, original = built.aggregation.kind, built.aggregation.denominator == "original"
    if kind == "token-mean":
        return not original
    whole = all(getattr(rule, "level", getattr(rule, "reduce", "")) != "token" for rule in built.masks)
    return original and (whole or kind != "seq-mean-token-mean")


def _quoted(text: str) -> str:
    """Returns a value, in quotes if Hydra would misread it: 0.5_5 as the number 0.55, or a comma as a choice."""
    return f'"{text}"' if re.search(r"\d_\d|,", text) else text


def _verl_dppo(built: Objective) -> dict[str, str]:
    """Returns the actor settings for a mask over π/μ. Raises `Absent` for a mask that verl lacks."""
    losses = {"binary_tv": "dppo_tv", "binary_kl": "dppo_kl"}
    [rule, *more] = built.masks
    if not (
        isinstance(rule, Divergence)
        and isinstance(built.surrogate, Reinforce)
        and (rule.over, rule.reduce, rule.outward) == ("current", "token", True)
        and rule.kind in losses
        and not more
    ):
        raise no_mask(rule)
    bound = f"{rule.max:g}"
    ceiling = f"{min(built.surrogate.ceiling, UNBOUNDED):g}"
    return {"loss_mode": losses[rule.kind], "clip_ratio_low": bound, "clip_ratio_high": bound, "clip_ratio_c": ceiling}


def _verl_surrogate(built: Objective) -> Settings:
    match built.surrogate, built.ratio.level:
        case LogProb(), _:
            return Settings({"loss_mode": "gpg"})
        case Clipped(dual=dual) as part, "token":  # verl always has a dual clip.
            return Settings({**_clip_ratios(part), "clip_ratio_c": "1e9" if dual is None else f"{dual:g}"})
        case Clipped(dual=dual) as part, "geometric":
            remarks = () if dual is None else ("# differs: verl's gspo has no dual clip",)
            return Settings({"loss_mode": "gspo", **_clip_ratios(part)}, remarks)
        case Reinforce(ceiling=ceiling), "token":
            relative = {"clip_ratio_low": "1.0", "clip_ratio_high": f"{min(ceiling, UNBOUNDED) - 1:.10g}"}
            return Settings({"loss_mode": "cispo", **relative})
        case SoftGate(positive=positive, negative=negative), "token":
            return Settings({"loss_mode": "sapo", "tau_pos": f"{positive:g}", "tau_neg": f"{negative:g}"})
        case GeometricClip() as part, "token":
            remark = "# differs: verl adds up the means of the micro-batches; equal with one. clip_ratio bounds log r"
            return Settings({"loss_mode": "geo_mean", **_clip_ratios(part)}, (remark,))
    raise no_term(built)


def _clip_ratios(part: Clipped | GeometricClip) -> dict[str, str]:
    return {"clip_ratio_low": f"{part.low:g}", "clip_ratio_high": f"{part.high:g}"}


def _verl_weight(weight: Weight) -> Settings:
    threshold, remarks = f"{weight.high:g}", ()
    if weight.bound == "mask":
        threshold = f'"{max(weight.low, LOWEST):g}_{weight.high:g}"'
    elif weight.bound == "clip":
        remarks = (f"# differs: verl only bounds the weight from above; nothing bounds it at {weight.low:g}",)
    normalize = {"rollout_is_batch_normalize": "true"} if weight.normalize else {}
    return Settings({"rollout_is": weight.level, "rollout_is_threshold": threshold, **normalize}, remarks)


def _verl_mask(rule: Mask) -> Settings:
    if isinstance(rule, Band) and rule.over == "proximal" and rule.level in LEVELS:
        option = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}[rule.level]
        # verl compares k1 = -log ratio with the logs of the bounds, so it bounds 1/ratio.
        low, high = (f"{max(1 / max(bound, LOWEST), LOWEST):.6g}" for bound in (rule.max, rule.min))
        remark = f"# verl bounds 1/ratio: these are the reciprocals of [{rule.min:g}, {rule.max:g}]"
        return Settings({"rollout_rs": option, "rollout_rs_threshold": f'"{low}_{high}"'}, (remark,))
    if isinstance(rule, Divergence) and rule.over == "proximal" and not rule.outward and rule.kind in ("k2", "k3"):
        # Not k1: verl bounds it on both sides.
        option = f"token_{rule.kind}" if rule.reduce == "token" else f"seq_{rule.reduce}_{rule.kind}"
        return Settings({"rollout_rs": option, "rollout_rs_threshold": f"{rule.max:g}"})
    raise no_mask(rule)


def trl(built: Objective) -> list[str]:
    remarks = unset_remarks(built, "TRL")
    if built.ratio.over == "behavior" and not isinstance(built.surrogate, GammaWeight):
        raise Absent("GRPOTrainer's ratio is π/π_old (the own loss of AsyncGRPOTrainer is token-bypass)")
    settings = [*corrections(built, ("token", "sequence"), _trl_weight, _trl_mask), _trl_surrogate(built)]
    remarks += [remark for one in settings for remark in one.remarks]
    options = {"vllm_importance_sampling_correction": str(built.weight is not None)}
    for one in settings:
        options |= one.options
    kind = built.aggregation.kind
    if isinstance(built.surrogate, GeometricClip):
        if len(settings) > 1 or kind != "seq-mean-token-mean":
            raise Absent("no geometric mean of clipped ratios with these parts")
        return [_call("trl.experimental.gmpo.GMPOConfig", options), *remarks]
    loss = options.get("loss_type", json.dumps(TRL_LOSSES.get(kind))).strip('"')
    if TRL_AGGREGATIONS.get(loss, kind) != kind or loss == "null":
        raise Absent(f"no aggregation {kind} of this loss")
    options["loss_type"] = json.dumps(loss)
    if built.aggregation.length_max is not None:
        options["max_completion_length"] = str(built.aggregation.length_max)
        remarks.append("# max_completion_length is the constant length, and the limit of generation too")
    if built.advantage == "dr-grpo":
        options["scale_rewards"] = '"none"'
    return [_call("GRPOConfig", options), *remarks]


def _call(name: str, options: Mapping[str, str]) -> str:
    return "\n".join(
        [f"{name}(", "    use_vllm=True,", *(f"    {key}={value}," for key, value in options.items()), ")"]
    )


def _trl_surrogate(built: Objective) -> Settings:
    match built.surrogate, built.ratio.level:
        case Clipped(low=low, high=high, dual=dual), "token" | "geometric" as level:
            options, remarks = {"epsilon": _python(low), "epsilon_high": _python(high)}, ()
            if level == "geometric":
                options["importance_sampling_level"] = '"sequence"'
            if dual is not None:
                options["delta"] = _python(dual)
                remarks = ("# differs: TRL's delta caps the ratio where A > 0 too",) if dual < 1 + high else ()
            return Settings(options, remarks)
        case GammaWeight() as part, "sequence":
            names = ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")
            values = (part.k1_positive, part.k2_positive, part.k1_negative, part.k2_negative)
            # TRL takes the product current/sampler from its correction, here without a bound.
            weight = {"correction": "True", "mode": '"token_truncate"', "clip_max": "1e9"}
            weight = {f"vllm_importance_sampling_{key}": value for key, value in weight.items()}
            return Settings({"loss_type": '"vespo"', **weight, **dict(zip(names, map(_python, values), strict=True))})
        case Reinforce(ceiling=ceiling), "token":
            return Settings({"loss_type": '"cispo"', "epsilon_high": _python(min(ceiling, UNBOUNDED))})
        case SoftGate(positive=positive, negative=negative), "token":
            options = {"sapo_temperature_pos": _python(positive), "sapo_temperature_neg": _python(negative)}
            return Settings({"loss_type": '"sapo"', **options})
        case GeometricClip(low=low, high=high), "token":
            return Settings({"epsilon": _python(low), "epsilon_high": _python(high)})
    raise no_term(built)


def _trl_weight(weight: Weight) -> Settings:
    form, key = "mask" if weight.bound == "mask" else "truncate", "vllm_importance_sampling"
    options = {f"{key}_mode": f'"{weight.level}_{form}"', f"{key}_clip_max": _python(weight.high)}
    options |= {f"{key}_clip_min": _python(weight.low)} if weight.low > 0 else {}
    return Settings(options, ("# differs: TRL does not normalize the weights",) if weight.normalize else ())


def _trl_mask(rule: Mask) -> Settings:
    if isinstance(rule, OPSM) and rule.sign == "negative":
        return Settings({"off_policy_mask_threshold": _python(rule.delta)})
    raise no_mask(rule)


def miles(built: Objective) -> list[str]:
    surrogate, masks = _miles_surrogate(built), corrections(built, LEVELS, _miles_weight, _miles_mask)
    weight = None if built.weight is None else masks.pop(0)
    rows = [f"--advantage-estimator {'gspo' if built.ratio.level == 'geometric' else 'grpo'}"]
    rows += ["--calculate-per-token-loss"] if built.aggregation.kind == "token-mean" else []
    rows += [*_flags(surrogate), *surrogate.remarks]
    if built.advantage == "dr-grpo":
        rows += ["--disable-grpo-std-normalization"]
    if built.aggregation.kind not in ("token-mean", "seq-mean-token-mean"):
        rows += [f"# differs: no aggregation {built.aggregation.kind}; examples/experimental/DrGRPO has a constant one"]
    helper: dict[str, str] = {}
    for setting in masks:
        rows += [*_flags(setting), *setting.remarks]
        helper |= _keys(setting)
    if built.ratio.over == "behavior":
        rows.append("--use-rollout-logprobs")
    remarks = unset_remarks(built, "Miles")
    if weight is None:
        rows += ["# differs: Miles' mismatch helper rejects beside a weight only"] if helper else []
        return [*rows, *remarks]
    built_in = _flags(weight)
    if built_in and not helper:
        return [*rows, *built_in, *remarks]
    settings = {**_keys(weight), "use_rs": "false", **helper}
    for key in ("rs_lower_bound", "rs_upper_bound", "rs_veto_threshold"):
        settings.setdefault(key, "null")
    # Flags and configuration file of the mismatch helper in Miles' examples.
    rows += ["--use-tis", f"--custom-tis-function-path {MIS}", "--custom-config-path mis.yaml", *remarks, "# mis.yaml"]
    return [*rows, *(f"{key}: {value}" for key, value in settings.items())]


def _flags(setting: Settings) -> list[str]:
    return [f"{key} {value}".rstrip() for key, value in setting.options.items() if key.startswith("--")]


def _keys(setting: Settings) -> dict[str, str]:
    return {key: value for key, value in setting.options.items() if not key.startswith("--")}


def _miles_surrogate(built: Objective) -> Settings:
    match built.surrogate, built.ratio.level:
        case Clipped(low=low, high=high, dual=dual), "token" | "geometric":
            bound = {} if dual is None else {"--eps-clip-c": f"{dual:g}"}
            return Settings({"--eps-clip": f"{low:g}", "--eps-clip-high": f"{high:g}", **bound})
    raise no_term(built)


def _miles_weight(weight: Weight) -> Settings:
    """Returns keys of the mismatch helper in Miles' examples and, if Miles has the weight built in, flags."""
    built_in = {}
    if weight.level == "token" and not weight.normalize:
        custom = {"--custom-tis-function-path": ICEPOP} if weight.bound == "mask" else {}
        bounds = {"--tis-clip": f"{weight.high:g}", "--tis-clip-low": f"{weight.low:g}"}
        built_in = {"--use-tis": "", **custom, **bounds}
    helper = {
        "use_tis": "true",
        "tis_level": weight.level,
        "tis_mode": weight.bound,
        "tis_lower_bound": _yaml(float(weight.low)),
        "tis_upper_bound": _yaml(float(weight.high)),
        "tis_batch_normalize": str(weight.normalize).lower(),
    }
    return Settings({**built_in, **helper})


def _miles_mask(rule: Mask) -> Settings:
    if isinstance(rule, Band) and rule.over == "proximal" and rule.level in LEVELS:
        bounds = {"rs_lower_bound": _yaml(float(rule.min)), "rs_upper_bound": _yaml(float(rule.max))}
        return Settings({"use_rs": "true", "rs_level": rule.level, **bounds})
    if isinstance(rule, Veto) and (rule.of, rule.over) == ("ratio", "proximal"):
        remark = "# differs: Miles applies its veto beside a band only (use_rs)"
        return Settings({"rs_veto_threshold": _yaml(float(rule.min))}, (remark,))
    if isinstance(rule, OPSM) and rule.sign == "negative":
        remark = "# differs: Miles compares with π_old, not with the sampler"
        return Settings({"--use-opsm": "", "--opsm-delta": f"{rule.delta:g}"}, (remark,))
    raise no_mask(rule)
