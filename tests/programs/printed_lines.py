"""The configuration lines of every preset, as printed, in the peers themselves; the environment must have both.

    python tests/programs/printed_lines.py verl|trl

Prints a JSON object as its last line: for each preset the lines, and how far the peer's loss and gradient are from the
preset's where the lines name a loss.
"""

from __future__ import annotations

import ast
import importlib
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from verl_losses import actor_of, composed, difference, nearer, run_config

from trimtab.adapters.config_lines import lines_for
from trimtab.adapters.micro_batch import turns_of
from trimtab.objectives import Objective, PolicyLogps, objective, objectives

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in objectives()},
    "icepop 3": ("icepop", {"weight_min": 0.6, "weight_max": 3.0}),
    "dapo dual": ("dapo", {"clip_dual": 1.5}),
    "dapo dual inside": ("dapo", {"clip_dual": 1.1}),
    "geo-mask kept": ("geo-mask", {"denominator": "kept", "keep_min": 0.9, "keep_max": 1.2}),
    "token-bypass dual": ("token-bypass", {"clip_dual": 1.5}),
    "dppo .02": ("dppo", {"divergence_max": 0.02, "ceiling": 2.0}),
    "seq-bypass 2": ("seq-bypass", {"clip_high": 2.0}),
    "cispo 1.2": ("cispo", {"ceiling": 1.2}),
    "grpo sums": ("grpo", {"aggregation": "seq-mean-token-sum"}),
    "sapo tokens": ("sapo", {"aggregation": "token-mean", "tau_positive": 0.7}),
    "a mask": ("grpo", {"mask": [{"kind": "k3", "reduce": "mean", "max": 0.05}]}),
    "a mask kept": ("grpo", {"mask": [{"kind": "k3", "reduce": "mean", "max": 0.05}], "denominator": "kept"}),
    "a mask of tokens": ("grpo", {"mask": [{"kind": "k3", "reduce": "token", "max": 0.05}]}),
    "token sums": (
        "grpo",
        {"mask": [{"kind": "band", "level": "token", "min": 0.9, "max": 1.1}], "aggregation": "seq-mean-token-sum"},
    ),
}
"""Presets with overrides, by name."""


def library(case: str, data: dict[str, Tensor]) -> tuple[float, Tensor, dict]:
    leaf, mask = data["log_prob"].clone().requires_grad_(), data["response_mask"]
    logps = PolicyLogps(
        current=leaf,
        behavior=data["rollout_log_probs"],
        mask=mask,
        proximal=data["old_log_probs"],
        turn=turns_of(mask),
        age=torch.zeros_like(mask, dtype=torch.long),
    )
    loss = built_of(case)(logps, data["advantages"][:, :1]).loss
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.item(), gradient, {}


def built_of(case: str) -> Objective:
    name, overrides = CASES[case]
    return objective(name, **overrides)


def code(text: str) -> list[str]:
    """The lines that are not comments."""
    return [line for line in text.splitlines() if not line.startswith("#")]


def verl() -> dict[str, Any]:
    """verl's configuration composed from the overrides, its driver, and its loss in two micro-batches, on one rank."""
    from verl import DataProto
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch as add

    result: dict[str, Any] = {}
    for name, case in CASES.items():
        text, data = lines_for("verl", *case), nearer()
        result[name] = {"text": text}
        words = [shlex.split(line) for line in code(text)]
        if not words:
            continue
        assert all(len(one) == 1 for one in words)
        config = composed([one[0] for one in words])
        correction = config.algorithm.rollout_correction
        carried = None
        if correction.bypass_mode:  # As the trainer V1 does.
            data["old_log_probs"] = data["rollout_log_probs"]
        else:
            fields = {key: value for key, value in data.items() if key != "length"}
            fields["response_mask"] = fields["response_mask"].long()
            corrected = add(DataProto.from_single_dict(fields), correction)[0].batch
            carried, data["response_mask"] = corrected.get("rollout_is_weights"), corrected["response_mask"].bool()
        found = run_config(actor_of(config), 2, carried=carried, data=data, ranks=1)
        if "# differs" not in text:
            result[name] |= difference(found, library(name, nearer()))
    return result


def trl() -> dict[str, Any]:
    """TRL's configuration built from the call, and the loss of its trainer on a stand-in, in two micro-batches."""
    import trl.experimental.gmpo
    from trl import GRPOConfig

    result: dict[str, Any] = {}
    names = {"trl": trl, "GRPOConfig": GRPOConfig}
    for name, case in CASES.items():
        text = lines_for("trl", *case)
        result[name] = {"text": text}
        if not code(text):
            continue
        call: Any = ast.parse(text, mode="eval").body
        kind = ast.unparse(call.func)
        result[name]["calls"] = kind
        if kind.startswith("trimtab.adapters"):
            built = ast.unparse(next(word.value for word in call.keywords if word.arg == "objective"))
            made = eval(built, {"trimtab": importlib.import_module("trimtab")})  # noqa: S307 - our own lines
            result[name]["same"] = made == built_of(name)
            continue
        call.keywords.append(ast.keyword("output_dir", ast.Constant("unused")))
        call.keywords += [ast.keyword(key, ast.Constant(value)) for key, value in (("use_cpu", True), ("bf16", False))]
        config = eval(ast.unparse(call), names)  # noqa: S307
        result[name] |= {} if "# differs" in text else difference(trl_loss(config), library(name, nearer()))
    return result


def trl_loss(config: Any) -> tuple[float, Tensor, dict]:
    """The loss of TRL's own method for a configuration; what it stores is what its constructor stores."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "parity"))
    from_trl = importlib.import_module("from_trl")
    from trl import GRPOTrainer
    from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

    trainer = GMPOTrainer if isinstance(config, GMPOConfig) else GRPOTrainer
    data = nearer()
    stand_in = from_trl.trainer({"mask": data["response_mask"]}, loss_type=config.loss_type)
    high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    stored = vars(config) | {"args": config, "epsilon_low": config.epsilon, "epsilon_high": high}
    stand_in.__dict__.update(stored)
    stand_in.aux_loss_enabled, stand_in._entropy_bonus_enabled = False, config.entropy_coef != 0
    stand_in.current_gradient_accumulation_steps = config.steps_per_generation = 2
    fields = {"proximal": data["old_log_probs"], "behavior": data["rollout_log_probs"], "mask": data["response_mask"]}
    leaf, mask = data["log_prob"].clone().requires_grad_(), data["response_mask"].float()
    total = torch.zeros(())
    for index in torch.arange(len(leaf)).chunk(2):
        inputs = {
            "prompt_ids": torch.zeros(len(index), 1, dtype=torch.long),
            "prompt_mask": torch.ones(len(index), 1, dtype=torch.long),
            "completion_ids": torch.zeros(mask[index].shape, dtype=torch.long),
            "completion_mask": mask[index],
            "advantages": data["advantages"][index][:, 0],
            "old_per_token_logps": data["old_log_probs"][index],
            "sampling_per_token_logps": data["rollout_log_probs"][index],
            "num_items_in_batch": mask.sum(),
        }
        if config.vllm_importance_sampling_correction:
            inputs["importance_sampling_ratio"] = importance_ratio(from_trl, config, fields)[index]
        scored = leaf[index], torch.zeros_like(leaf[index]), None
        stand_in._get_per_token_logps_and_entropies = lambda *_, scored=scored, **__: scored
        total = total + trainer._compute_loss(stand_in, stand_in.model, inputs)
    (gradient,) = torch.autograd.grad(total, leaf)
    return total.item(), gradient, {}


def importance_ratio(from_trl: Any, config: Any, fields: dict[str, Tensor]) -> Tensor:
    """TRL's own statements with the configuration."""
    given = {key: getattr(config, f"vllm_importance_sampling_{key}") for key in ("mode", "clip_min", "clip_max")}
    return from_trl.importance_ratio(fields, given)


if __name__ == "__main__":
    import verl as _verl  # noqa: F401 - loads the plugin

    print(json.dumps(globals()[sys.argv[1]]()))
