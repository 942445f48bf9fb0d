"""An objective as flags of Miles, and as the file of the mismatch helper in its examples."""

from __future__ import annotations

from trimtab.adapters.config_lines.own_settings import LEVELS, Settings, no_mask, no_term, no_weight, unset_remarks
from trimtab.corrections import OPSM, Band, Mask, Veto, Weight
from trimtab.objectives import Clipped, Objective

ICEPOP = "miles.backends.training_utils.loss_hub.corrections.icepop_function"
MIS = "examples.infra_features.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp"


def miles(built: Objective) -> list[str]:
    surrogate, weight = _surrogate(built), None if built.weight is None else _weight(built.weight)
    masks = [_mask(rule) for rule in built.masks]
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
        return [
            *rows,
            *(["# differs: Miles' mismatch helper rejects beside a weight only"] if helper else []),
            *remarks,
        ]
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


def _surrogate(built: Objective) -> Settings:
    part, level = built.surrogate, built.ratio.level
    if not isinstance(part, Clipped) or level not in ("token", "geometric"):  # None clips the product of a response.
        raise no_term(built)
    dual = {} if part.dual is None else {"--eps-clip-c": f"{part.dual:g}"}
    return Settings({"--eps-clip": f"{part.low:g}", "--eps-clip-high": f"{part.high:g}", **dual})


def _weight(weight: Weight) -> Settings:
    """Returns flags where Miles has the weight built in, and keys for the mismatch helper of its examples."""
    if weight.level not in LEVELS or weight.over == "current":
        raise no_weight(weight)
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


def _mask(rule: Mask) -> Settings:
    if isinstance(rule, Band) and rule.over == "proximal" and rule.level in LEVELS:
        bounds = {"rs_lower_bound": f"{float(rule.min)!r}", "rs_upper_bound": f"{float(rule.max)!r}"}
        return Settings({"use_rs": "true", "rs_level": rule.level, **bounds})
    if isinstance(rule, Veto) and (rule.of, rule.over) == ("ratio", "proximal"):
        remark = "# differs: Miles applies its veto beside a band only (use_rs)"
        return Settings({"rs_veto_threshold": f"{float(rule.min)!r}"}, (remark,))
    if isinstance(rule, OPSM) and rule.sign == "negative":
        remark = "# differs: Miles compares with π_old, not with the sampler"
        return Settings({"--use-opsm": "", "--opsm-delta": f"{rule.delta:g}"}, (remark,))
    raise no_mask(rule)
