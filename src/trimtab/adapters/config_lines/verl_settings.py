"""An objective as settings of verl's own losses and of its rollout correction."""

from __future__ import annotations

import re

from trimtab.adapters.config_lines.adapter_lines import ACTOR, ALGORITHM, assignment, verl_aggregation
from trimtab.adapters.config_lines.own_settings import (
    LEVELS,
    UNBOUNDED,
    Absent,
    Settings,
    no_mask,
    no_term,
    no_weight,
    unset_remarks,
)
from trimtab.corrections import Band, Divergence, Mask, Weight
from trimtab.objectives import Clipped, GeometricClip, LogProb, Objective, Reinforce, SoftGate

CORRECTION = f"{ALGORITHM}.rollout_correction"
LOWEST = 1e-6
"""Written for a lower bound of 0, which verl refuses and its IcePop form requires."""


def verl(built: Objective) -> list[str]:
    """Returns overrides of Hydra. What reads π/μ takes the sampler's log-probs for those at the start: bypass_mode."""
    remarks, bypass = unset_remarks(built, "verl"), built.ratio.over == "behavior"
    options = {f"{CORRECTION}.rollout_is": "null"}
    if bypass:
        if built.weight is not None:
            raise Absent("no weight beside π/μ")
        options = {f"{CORRECTION}.bypass_mode": "True"}
        actor = _dppo(built) if built.masks else _surrogate(built).options
        if "loss_mode" in actor:
            remarks.append("# with verl's trainer V1, its default; v0 replaces the loss in bypass_mode")
    else:
        surrogate = _surrogate(built)
        weights = [] if built.weight is None else [_weight(built.weight)]
        corrections = [*weights, *map(_mask, built.masks)]
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
        raise no_mask(rule)
    bound = f"{rule.max:g}"
    ceiling = f"{min(built.surrogate.ceiling, UNBOUNDED):g}"
    return {"loss_mode": losses[rule.kind], "clip_ratio_low": bound, "clip_ratio_high": bound, "clip_ratio_c": ceiling}


def _surrogate(built: Objective) -> Settings:
    part, level = built.surrogate, built.ratio.level
    if isinstance(part, LogProb):
        return Settings({"loss_mode": "gpg"})
    if isinstance(part, Clipped) and level in ("token", "geometric"):  # None clips the product of a response.
        bounds = {"clip_ratio_low": f"{part.low:g}", "clip_ratio_high": f"{part.high:g}"}
        if level == "geometric":
            remarks = () if part.dual is None else ("# differs: verl's gspo has no dual clip",)
            return Settings({"loss_mode": "gspo", **bounds}, remarks)
        # verl always has a dual clip.
        return Settings({**bounds, "clip_ratio_c": "1e9" if part.dual is None else f"{part.dual:g}"})
    if level != "token":
        raise no_term(built)
    if isinstance(part, Reinforce):
        relative = {"clip_ratio_low": "1.0", "clip_ratio_high": f"{min(part.ceiling, UNBOUNDED) - 1:.10g}"}
        return Settings({"loss_mode": "cispo", **relative})
    if isinstance(part, SoftGate):
        return Settings({"loss_mode": "sapo", "tau_pos": f"{part.positive:g}", "tau_neg": f"{part.negative:g}"})
    if isinstance(part, GeometricClip):
        bounds = {"clip_ratio_low": f"{part.low:g}", "clip_ratio_high": f"{part.high:g}"}
        remark = "# differs: verl adds up the means of the micro-batches; equal with one. clip_ratio bounds log r"
        return Settings({"loss_mode": "geo_mean", **bounds}, (remark,))
    raise no_term(built)


def _weight(weight: Weight) -> Settings:
    if weight.level not in ("token", "sequence") or weight.over == "current":
        raise no_weight(weight)
    threshold, remarks = f"{weight.high:g}", ()
    if weight.bound == "mask":
        threshold = f'"{max(weight.low, LOWEST):g}_{weight.high:g}"'
    elif weight.bound == "clip":
        remarks = (f"# differs: verl only bounds the weight from above; nothing bounds it at {weight.low:g}",)
    normalize = {"rollout_is_batch_normalize": "true"} if weight.normalize else {}
    return Settings({"rollout_is": weight.level, "rollout_is_threshold": threshold, **normalize}, remarks)


def _mask(rule: Mask) -> Settings:
    if isinstance(rule, Band) and rule.over == "proximal" and rule.level in LEVELS:
        option = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}[rule.level]
        # verl compares k1 = -log ratio with the logs of the bounds, and so bounds 1/ratio.
        low, high = (f"{max(1 / max(bound, LOWEST), LOWEST):.6g}" for bound in (rule.max, rule.min))
        remark = f"# verl bounds 1/ratio: these are the reciprocals of [{rule.min:g}, {rule.max:g}]"
        return Settings({"rollout_rs": option, "rollout_rs_threshold": f'"{low}_{high}"'}, (remark,))
    if isinstance(rule, Divergence) and rule.over == "proximal" and not rule.outward and rule.kind in ("k2", "k3"):
        # Its k1 bounds both sides.
        option = f"token_{rule.kind}" if rule.reduce == "token" else f"seq_{rule.reduce}_{rule.kind}"
        return Settings({"rollout_rs": option, "rollout_rs_threshold": f"{rule.max:g}"})
    raise no_mask(rule)
