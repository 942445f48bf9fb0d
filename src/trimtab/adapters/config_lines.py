"""Renders an objective as configuration of Trimtab and of other trainers: what each calls the parts.

First come the trainer's own settings, where its own loss is this one, or nearly: a comment that begins with "differs"
says how it is not. Where it has none, its adapter's lines, or those of the nearest preset. Option names are those of
verl 0.9.1, TRL 1.16 and Miles 31f1ca96; the lines of the first two are run (docs/choosing.md).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from trimtab.adapters.adapter_lines import ACTOR, ALGORITHM, adapter_lines, assignment, verl_aggregation, written
from trimtab.adapters.hooks import HOOKS, OWN_RUN, hook
from trimtab.corrections import OPSM, TURN_LEVELS, Band, Divergence, Mask, Veto, Weight
from trimtab.errors import TrimtabError, did_you_mean
from trimtab.objectives import (
    Clipped,
    GammaWeight,
    GeometricClip,
    LogProb,
    Objective,
    Reinforce,
    SoftGate,
    Surrogate,
    objective,
)
from trimtab.objectives.calibrate import bounds_of

ICEPOP = "miles.backends.training_utils.loss_hub.corrections.icepop_function"
MIS = "examples.infra_features.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp"
CORRECTION = f"{ALGORITHM}.rollout_correction"
UNBOUNDED = 1e9
"""In place of no bound where a framework must have one: above the largest ratio, e^20."""
VERL_LOWEST = 1e-6
"""Written for a lower bound of 0, which verl refuses and its IcePop form requires."""
LEVELS = ("token", "sequence", "geometric")
"""Levels of weights and bands that other trainers have."""

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


class Settings(NamedTuple):
    """The settings of a part in another trainer.

    options: values as written in its configuration, empty for a flag. verl: keys of `rollout_correction` (weights,
    masks) or `actor` (surrogates); TRL: arguments of `GRPOConfig`; Miles: flags, or keys of its mismatch helper's file.
    remarks: comments on what differs there.
    """

    options: dict[str, str]
    remarks: tuple[str, ...] = ()


def _surrogate(built: Objective, name: str) -> Settings:
    """Returns the settings of the term. Raises `_Absent` where a trainer has none."""
    found = _terms(built.surrogate, built.ratio.level).get(name)
    if found is None:
        raise _Absent(f"no term {built.surrogate.equation('r')}")
    return found


def _terms(part: Surrogate, level: str) -> dict[str, Settings]:
    """Returns the settings of a term by trainer. level: that of the ratio."""
    if isinstance(part, LogProb):
        return {"verl": Settings({"loss_mode": "gpg"})}
    if isinstance(part, Clipped) and level in ("token", "geometric"):  # None clips the product of a response.
        return _clipped(part, level)
    if isinstance(part, GammaWeight) and level == "sequence":
        names = ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")
        values = (part.k1_positive, part.k2_positive, part.k1_negative, part.k2_negative)
        # The product current/sampler is that of TRL's correction, unbounded.
        weight = {"correction": "True", "mode": '"token_truncate"', "clip_max": "1e9"}
        weight = {f"vllm_importance_sampling_{key}": value for key, value in weight.items()}
        return {"TRL": Settings({"loss_type": '"vespo"', **weight, **dict(zip(names, map(repr, values), strict=True))})}
    if level != "token":
        return {}
    if isinstance(part, Reinforce):
        ceiling = min(part.ceiling, UNBOUNDED)
        relative = {"clip_ratio_low": "1.0", "clip_ratio_high": f"{ceiling - 1:.10g}"}
        return {
            "verl": Settings({"loss_mode": "cispo", **relative}),
            "TRL": Settings({"loss_type": '"cispo"', "epsilon_high": repr(ceiling)}),
        }
    if isinstance(part, SoftGate):
        temperatures = {"tau_pos": f"{part.positive:g}", "tau_neg": f"{part.negative:g}"}
        options = {"sapo_temperature_pos": repr(part.positive), "sapo_temperature_neg": repr(part.negative)}
        return {
            "verl": Settings({"loss_mode": "sapo", **temperatures}),
            "TRL": Settings({"loss_type": '"sapo"', **options}),
        }
    if isinstance(part, GeometricClip):
        bounds = {"clip_ratio_low": f"{part.low:g}", "clip_ratio_high": f"{part.high:g}"}
        remark = "# differs: verl adds up the means of the micro-batches; equal with one. clip_ratio bounds log r"
        trl = {"epsilon": repr(part.low), "epsilon_high": repr(part.high)}
        return {"verl": Settings({"loss_mode": "geo_mean", **bounds}, (remark,)), "TRL": Settings(trl)}
    return {}


def _clipped(part: Clipped, level: str) -> dict[str, Settings]:
    bounds = {"clip_ratio_low": f"{part.low:g}", "clip_ratio_high": f"{part.high:g}"}
    # verl always has a dual clip.
    verl = {**bounds, "clip_ratio_c": "1e9" if part.dual is None else f"{part.dual:g}"}
    trl = {"epsilon": repr(part.low), "epsilon_high": repr(part.high)}
    miles = {"--eps-clip": f"{part.low:g}", "--eps-clip-high": f"{part.high:g}"}
    of_verl, of_trl = tuple[str, ...](), tuple[str, ...]()
    if level == "geometric":
        verl, trl = {"loss_mode": "gspo", **bounds}, {**trl, "importance_sampling_level": '"sequence"'}
        of_verl = () if part.dual is None else ("# differs: verl's gspo has no dual clip",)
    if part.dual is not None:
        trl |= {"delta": repr(part.dual)}
        miles |= {"--eps-clip-c": f"{part.dual:g}"}
        of_trl = ("# differs: TRL's delta caps the ratio where A > 0 too",) if part.dual < 1 + part.high else ()
    return {"verl": Settings(verl, of_verl), "TRL": Settings(trl, of_trl), "Miles": Settings(miles)}


def _corrections(built: Objective, name: str) -> list[Settings]:
    """Returns the settings of the weight and the masks. Raises `_Absent` where a trainer has none."""
    weight = [] if built.weight is None else [_weight(built.weight, name)]
    return [*weight, *(_mask(rule, name) for rule in built.masks)]


def _weight(weight: Weight, name: str) -> Settings:
    if weight.level not in LEVELS:
        raise _Absent(f"{name} has no weight for each {_unit(weight.level)}")
    if name == "Miles":
        return _miles_weight(weight)
    if weight.level == "geometric":
        raise _Absent(f"{name} has no geometric weight")
    if name == "TRL":
        form, key = "mask" if weight.bound == "mask" else "truncate", "vllm_importance_sampling"
        options = {f"{key}_mode": f'"{weight.level}_{form}"', f"{key}_clip_max": repr(weight.high)}
        options |= {f"{key}_clip_min": repr(weight.low)} if weight.low > 0 else {}
        return Settings(options, ("# differs: TRL does not normalize the weights",) if weight.normalize else ())
    threshold, remarks = f"{weight.high:g}", ()
    if weight.bound == "mask":
        threshold = f'"{max(weight.low, VERL_LOWEST):g}_{weight.high:g}"'
    elif weight.bound == "clip":
        remarks = (f"# differs: verl only bounds the weight from above; nothing bounds it at {weight.low:g}",)
    normalize = {"rollout_is_batch_normalize": "true"} if weight.normalize else {}
    return Settings({"rollout_is": weight.level, "rollout_is_threshold": threshold, **normalize}, remarks)


def _miles_weight(weight: Weight) -> Settings:
    """Returns flags where Miles has the weight built in, and keys for the mismatch helper of its examples."""
    built_in = {}
    if weight.level == "token" and not weight.normalize:
        custom = {"--custom-tis-function-path": ICEPOP} if weight.bound == "mask" else {}
        bounds = {"--tis-clip": f"{weight.high:g}", "--tis-clip-low": f"{weight.low:g}"}
        built_in = {"--use-tis": "", **custom, **bounds}
    helper = {
        "use_tis": "true",
        "tis_level": weight.level,
        "tis_mode": weight.bound,
        "tis_lower_bound": f"{float(weight.low)!r}",
        "tis_upper_bound": f"{float(weight.high)!r}",
        "tis_batch_normalize": str(weight.normalize).lower(),
    }
    return Settings({**built_in, **helper})


def _mask(rule: Mask, name: str) -> Settings:
    """Returns the settings of a rejection rule. Raises `_Absent`, which says what a trainer has not."""
    if isinstance(rule, Band | Divergence) and rule.over == "current":
        raise _Absent(f"{name} has no mask on π/μ")
    if isinstance(rule, Band):
        return _band(rule, name)
    if isinstance(rule, Divergence):
        token = rule.reduce == "token"
        if name == "verl" and not rule.outward and rule.kind in ("k2", "k3"):  # its k1 bounds both sides
            option = f"token_{rule.kind}" if token else f"seq_{rule.reduce}_{rule.kind}"
            return Settings({"rollout_rs": option, "rollout_rs_threshold": f"{rule.max:g}"})
        of = f"{rule.kind} of a token" if token else f"{rule.reduce} {rule.kind} of a response"
        raise _Absent(f"{name} has no mask on the {of} ({rule.max:g})")
    if isinstance(rule, Veto) and (rule.of, rule.over) != ("ratio", "proximal"):
        policy = "π_old" if rule.over == "proximal" else "π"
        raise _Absent(f"{name} has no veto on {policy}{'/μ' if rule.of == 'ratio' else ''}")
    if isinstance(rule, Veto) and name == "Miles":
        remark = "# differs: Miles applies its veto beside a band only (use_rs)"
        return Settings({"rs_veto_threshold": f"{float(rule.min)!r}"}, (remark,))
    if isinstance(rule, OPSM):
        if rule.sign != "negative":
            raise _Absent(f"{name} has no OPSM of A {'>' if rule.sign == 'positive' else '≠'} 0")
        if name == "verl":
            raise _Absent("verl has no OPSM")
        if name == "TRL":
            return Settings({"off_policy_mask_threshold": repr(rule.delta)})
        remark = "# differs: Miles compares with π_old, not with the sampler"
        return Settings({"--use-opsm": "", "--opsm-delta": f"{rule.delta:g}"}, (remark,))
    raise _Absent(f"no mask: keep where {rule.equation()}")


def _band(rule: Band, name: str) -> Settings:
    if rule.level not in LEVELS:
        raise _Absent(f"{name} has no mask for each {_unit(rule.level)}")
    if name == "TRL":
        raise _Absent(f"TRL has no {rule.level} mask [{rule.min:g}, {rule.max:g}]")
    if name == "Miles":
        bounds = {"rs_lower_bound": f"{float(rule.min)!r}", "rs_upper_bound": f"{float(rule.max)!r}"}
        return Settings({"use_rs": "true", "rs_level": rule.level, **bounds})
    option = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}[rule.level]
    # verl compares k1 = -log ratio with the logs of the bounds, and so bounds 1/ratio.
    low, high = (f"{max(1 / max(bound, VERL_LOWEST), VERL_LOWEST):.6g}" for bound in (rule.max, rule.min))
    remark = f"# verl bounds 1/ratio: these are the reciprocals of [{rule.min:g}, {rule.max:g}]"
    return Settings({"rollout_rs": option, "rollout_rs_threshold": f'"{low}_{high}"'}, (remark,))


def _unit(level: str) -> str:
    return "turn" if level in TURN_LEVELS else "prefix"


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
        actor = _dppo(built) if built.masks else _surrogate(built, "verl").options
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
    return {"loss_mode": losses[rule.kind], "clip_ratio_low": bound, "clip_ratio_high": bound, "clip_ratio_c": ceiling}


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


def _flags(setting: Settings) -> list[str]:
    return [f"{key} {value}".rstrip() for key, value in setting.options.items() if key.startswith("--")]


def _keys(setting: Settings) -> dict[str, str]:
    return {key: value for key, value in setting.options.items() if not key.startswith("--")}


_OWN: dict[str, Callable[[Objective], list[str]]] = {"verl": _verl, "trl": _trl, "miles": _miles}
