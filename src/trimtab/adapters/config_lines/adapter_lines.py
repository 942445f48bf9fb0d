"""Renders an objective as the lines that a user of a trainer's adapter writes (docs/adapters.md)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from trimtab.adapters.hooks import hook
from trimtab.adapters.skyrl import REDUCTIONS
from trimtab.adapters.verl_loss import MODES
from trimtab.objectives import Aggregation, Objective

ACTOR, ALGORITHM = "actor_rollout_ref.actor", "algorithm"
_NAMES = {
    "python": ("True", "False", "None", 'float("inf")', "{", ": "),
    "toml": ("true", "false", "", "inf", "{", " = "),
    "yaml": ("true", "false", "null", ".inf", "{", ": "),
    "hydra": ("True", "False", "null", "inf", "{", ":"),
}


def written(value: Any, language: str) -> str:
    """Returns a number, bool, string, None, list or table as text of a language (a key of `_NAMES`)."""
    true, false, nothing, infinite, opened, between = _NAMES[language]
    if value is None or isinstance(value, bool):
        return nothing if value is None else true if value else false
    if isinstance(value, float) and math.isinf(value):
        return infinite if value > 0 else f"-{infinite}"
    if isinstance(value, Mapping):
        key = (lambda name: f'"{name}"') if language == "python" else str
        items = (f"{key(name)}{between}{written(one, language)}" for name, one in value.items())
        return f"{opened}{', '.join(items)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(written(one, language) for one in value)}]"
    if isinstance(value, str):
        plain = language in ("yaml", "hydra") and re.fullmatch(r"[A-Za-z][\w.-]*", value)
        return value if plain else '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    # YAML reads 1e-05, without a dot, as text.
    return re.sub(r"^(-?\d+)e", r"\1.0e", repr(value)) if language == "yaml" else repr(value)


def assignment(key: str, value: str) -> str:
    """Returns a Hydra override as one word of a shell. value: already in the grammar of Hydra."""
    text = f"{key}={value}"
    return text if re.fullmatch(r"[\w.+=:/-]+", text) else f"'{text}'"


def adapter_lines(
    trainer: str, preset: str, overrides: Mapping[str, Any], built: Objective
) -> tuple[list[str], str | None]:
    """Returns the lines of a trainer's adapter and None, or no lines and the reason why it refuses the objective.

    trainer: a key of `hooks.HOOKS`. built: the objective of the preset and the overrides. If the trainer lacks the
    aggregation, the lines set another one, with a remark.
    """
    one, keywords, remarks = hook(trainer), dict(overrides), []
    kind = built.aggregation.kind
    if one.aggregations and kind not in one.aggregations:
        changed = replace(built, aggregation=Aggregation(one.aggregations[0], built.aggregation.denominator))
        if one.refusal(changed) is None:
            remarks = [f"# differs: {one.trainer} divides by {changed.aggregation.kind}, the preset by {kind}"]
            keywords |= {"aggregation": changed.aggregation.kind}
            keywords.pop("length_max", None)
            built = changed
    if (reason := one.refusal(built)) is not None:
        return [], reason
    if trainer in _CONFIGURATIONS:
        return [*_CONFIGURATIONS[trainer](preset, keywords, built), *remarks], None
    return [_SCRIPTS[trainer].format(_arguments(preset, keywords)), *remarks], None


def _arguments(preset: str, keywords: Mapping[str, Any]) -> str:
    """Returns an objective's name and keywords as arguments of a call in Python."""
    return ", ".join([f'"{preset}"', *(f"{key}={written(value, 'python')}" for key, value in keywords.items())])


def verl_aggregation(built: Objective) -> dict[str, str]:
    """Returns verl's settings, by their key in Hydra, for the aggregation and the advantages of an objective."""
    kind, options = built.aggregation.kind, dict[str, str]()
    if kind != "token-mean":
        options[f"{ACTOR}.loss_agg_mode"] = MODES.get(kind, kind)
    if built.aggregation.length_max is not None:
        options[f"{ACTOR}.loss_scale_factor"] = str(built.aggregation.length_max)
    if built.advantage == "dr-grpo":
        options[f"{ALGORITHM}.norm_adv_by_std_in_grpo"] = "False"
    return options


def _verl(preset: str, keywords: Mapping[str, Any], built: Objective) -> list[str]:
    options = {f"{ACTOR}.policy_loss.loss_mode": f"trimtab-{preset}", **verl_aggregation(built)}
    given = {key: value for key, value in keywords.items() if key != "length_max"}
    options |= {f"+{ACTOR}.policy_loss.trimtab.{key}": written(value, "hydra") for key, value in given.items()}
    return [assignment(key, value) for key, value in options.items()]


def _prime_rl(preset: str, keywords: Mapping[str, Any], built: Objective) -> list[str]:  # noqa: ARG001
    given = {"objective": preset, **keywords}
    return [
        "[trainer.loss]",
        'type = "custom"',
        'import_path = "trimtab.adapters.prime_rl.loss"',
        "",
        "[trainer.loss.kwargs]",
        *(f"{key} = {written(value, 'toml')}" for key, value in given.items() if value is not None),
    ]


def _skyrl(preset: str, keywords: Mapping[str, Any], built: Objective) -> list[str]:
    settings = {
        "policy_loss_type": f"trimtab-{preset}",
        "loss_reduction": REDUCTIONS[built.aggregation.kind],
        "max_seq_len": built.aggregation.length_max,
    }
    return [
        f"trimtab.adapters.skyrl.register({_arguments(preset, keywords)})  # before ray.init, and on the command line:",
        *(f"# trainer.algorithm.{key}={value}" for key, value in settings.items() if value is not None),
    ]


def _miles(preset: str, keywords: Mapping[str, Any], built: Objective) -> list[str]:
    given = preset if not keywords else {"name": preset, **keywords}
    return [
        "--loss-type custom_loss",
        "--custom-loss-function-path trimtab.adapters.slime.loss",
        "--custom-config-path trimtab.yaml",
        *(["--calculate-per-token-loss"] if built.aggregation.kind == "token-mean" else []),
        "# trimtab.yaml",
        f"trimtab_objective: {written(given, 'yaml')}",
    ]


_SCRIPTS = {
    "trl": "trimtab.adapters.trl.GRPOTrainer(..., objective=trimtab.objective({}))",
    "trl-async": "trimtab.adapters.trl.AsyncGRPOTrainer(..., objective=trimtab.objective({}))",
    "nemo-rl": "loss_fn = trimtab.adapters.nemo_rl.ObjectiveLoss({}, replaces=loss_fn)",
    "areal": "trimtab.adapters.areal.install({})  # in the constructor of an actor",
    "openrlhf": "trimtab.adapters.openrlhf.install({})  # in the process of the policy actor",
    "tinker": "client.forward_backward_custom(data, trimtab.adapters.tinker.custom_loss({}))",
}
"""Trainer -> line of a Python script; {} stands for the name of the objective and its keywords."""

_CONFIGURATIONS: dict[str, Callable[[str, Mapping[str, Any], Objective], list[str]]] = {
    "verl": _verl,
    "prime-rl": _prime_rl,
    "skyrl": _skyrl,
    "miles": _miles,
    "slime": _miles,
}
