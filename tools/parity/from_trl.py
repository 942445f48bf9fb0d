"""What TRL's `GRPOTrainer` computes: loss types, delta, KL, off-policy mask, sampling correction, advantages.

The loss runs as TRL's own method on a stand-in trainer that hands it log-probs instead of a model. Two pieces are not
functions of their own (the correction for the sampler's log-probs, and the advantages): their statements are taken
from the installed source by the name they assign, and executed as they are.
"""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import math
import textwrap
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from generate import Batch, Recording, each, with_gradient
from trl import GRPOTrainer
from trl.trainer import grpo_trainer

IMPORTANCE: dict[str, dict[str, Any]] = {
    "token_truncate-2": {"mode": "token_truncate", "clip_min": None, "clip_max": 2.0},
    "token_truncate-0.9-1.2": {"mode": "token_truncate", "clip_min": 0.9, "clip_max": 1.2},
    "token_mask-0.5-2": {"mode": "token_mask", "clip_min": 0.5, "clip_max": 2.0},
    "sequence_truncate-3": {"mode": "sequence_truncate", "clip_min": None, "clip_max": 3.0},
    "sequence_mask-3": {"mode": "sequence_mask", "clip_min": None, "clip_max": 3.0},
}

LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "grpo-0.1-0.28": {"loss_type": "grpo", "epsilon": 0.1, "epsilon_high": 0.28},
    "bnpo": {"loss_type": "bnpo"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "cispo-1.1": {"loss_type": "cispo", "epsilon_high": 1.1},
    "delta-1.5": {"loss_type": "grpo", "delta": 1.5},
    "delta-1.1": {"loss_type": "grpo", "delta": 1.1},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
    "kl": {"loss_type": "dapo", "beta": 0.04},
    "kl-corrected": {"loss_type": "dapo", "beta": 0.04, "use_bias_correction_kl": True},
    "opsm-0.05": {"loss_type": "grpo", "off_policy_mask_threshold": 0.05},
    "sapo": {"loss_type": "sapo"},
    "sapo-0.7-1.3": {"loss_type": "sapo", "sapo_temperature_pos": 0.7, "sapo_temperature_neg": 1.3},
    "vespo": {"loss_type": "vespo"},
    "entropy": {"loss_type": "dapo", "entropy_coef": 0.01},
    "entropy-grpo": {"loss_type": "grpo", "entropy_coef": 0.01},
}


def trainer(batch: Batch, **call: Any) -> SimpleNamespace:
    """The attributes `_compute_loss` reads, for one process and no accumulation."""
    arguments = SimpleNamespace(
        delta=call.get("delta"),
        use_bias_correction_kl=call.get("use_bias_correction_kl", False),
        sapo_temperature_pos=call.get("sapo_temperature_pos", 1.0),
        sapo_temperature_neg=call.get("sapo_temperature_neg", 1.05),
        vespo_k_pos=2.0,
        vespo_lambda_pos=3.0,
        vespo_k_neg=3.0,
        vespo_lambda_neg=2.0,
        steps_per_generation=1,
    )
    epsilon = call.get("epsilon", 0.2)
    sampling = call.get("sampling") or {}
    return SimpleNamespace(
        args=arguments,
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, **_: x, sync_gradients=True),
        model=SimpleNamespace(training=True),
        loss_type=call["loss_type"],
        beta=call.get("beta", 0.0),
        epsilon_low=epsilon,
        epsilon_high=call.get("epsilon_high", epsilon),
        importance_sampling_level=call.get("importance_sampling_level", "token"),
        off_policy_mask_threshold=call.get("off_policy_mask_threshold"),
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        top_entropy_quantile=1.0,
        aux_loss_enabled=False,
        use_vllm=bool(sampling),
        vllm_importance_sampling_correction=bool(sampling),
        vllm_importance_sampling_mode=sampling.get("mode"),
        vllm_importance_sampling_clip_min=sampling.get("clip_min"),
        vllm_importance_sampling_clip_max=sampling.get("clip_max"),
        current_gradient_accumulation_steps=1,
        max_completion_length=batch["mask"].shape[1],
        _entropy_bonus_enabled="entropy_coef" in call,
        use_adaptive_entropy=False,
        entropy_coef=call.get("entropy_coef", 0.0),
        _metrics={"train": defaultdict(list)},
    )


def statements(method: Any, assigned: str) -> Any:
    """The innermost `if` of a method's body whose branch assigns this name, compiled."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    result = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If)
        and any(
            isinstance(child, ast.Assign) and any(isinstance(t, ast.Name) and t.id == assigned for t in child.targets)
            for child in node.body
        )
    ]
    if not result:
        raise SystemExit(f"no branch of {method.__qualname__} assigns {assigned!r}: this is another version of TRL")
    return compile(ast.Module([result[0]], []), inspect.getsourcefile(method) or "trl", "exec")


def importance_ratio(batch: Batch, sampling: dict[str, Any]) -> torch.Tensor:
    names = {
        "self": trainer(batch, loss_type="grpo", sampling=sampling),
        "completion_mask": batch["mask"].double(),
        "tool_mask": None,
        "old_per_token_logps": batch["proximal"],
        "sampling_per_token_logps": batch["behavior"],
        "torch": torch,
        "math": math,
    }
    exec(statements(GRPOTrainer._generate_and_score_completions, "vllm_importance_sampling_ratio"), names)  # noqa: S102 the installed peer
    return names["vllm_importance_sampling_ratio"]


def advantages(batch: Batch, scale_rewards: str) -> torch.Tensor:
    names = {
        "self": SimpleNamespace(
            multi_objective_aggregation="sum_then_normalize", scale_rewards=scale_rewards, reward_weights=torch.ones(1)
        ),
        "rewards_per_func": batch["rewards"][:, None],
        "unscorable_mask": torch.zeros(len(batch["rewards"]), dtype=torch.bool),
        "num_generations": 4,
        "device": "cpu",
        "torch": torch,
        "nanstd": grpo_trainer.nanstd,
    }
    exec(statements(GRPOTrainer._generate_and_score_completions, "advantages"), names)  # noqa: S102 the installed peer
    return names["advantages"][:, None]


def record(batches: dict[str, Batch]) -> Recording:
    versions = {name: importlib.metadata.version(name) for name in ("trl", "transformers", "torch")}
    recording = Recording(versions)
    for name, batch in each(batches):
        for case, call in LOSSES.items():
            _loss(recording, f"loss/{case}", name, batch, call)
        for case, sampling in IMPORTANCE.items():
            ratio = importance_ratio(batch, sampling)
            recording.add(f"importance/{case}", name, sampling, ratio=ratio.expand_as(batch["current"]) * batch["mask"])
            _loss(recording, f"loss/importance/{case}", name, batch, {"loss_type": "dapo", "sampling": sampling})
        for threshold in (0.01, 0.05, 0.1):
            keep = GRPOTrainer.get_off_policy_mask(
                batch["advantage"], batch["current"], batch["behavior"], batch["mask"].double(), threshold
            )
            recording.add(f"off_policy_mask/{threshold}", name, {"off_policy_threshold": threshold}, keep=keep.bool())
        for scale in ("group", "none"):
            recording.add(f"advantage/{scale}", name, {"scale_rewards": scale}, advantages=advantages(batch, scale))
    for name, batch in each(batches, "mild"):
        unscored = batch | {"behavior": batch["behavior"].clone()}
        unscored["behavior"][0, 0] = torch.nan
        ratio = importance_ratio(unscored, IMPORTANCE["token_truncate-2"])
        recording.add("importance/unscored", name, IMPORTANCE["token_truncate-2"], ratio=ratio * batch["mask"])
    for name, batch in each(batches, "empty"):
        for case in ("grpo", "dapo", "dr_grpo"):
            _loss(recording, f"loss/{case}", name, batch, LOSSES[case], metrics=False)
    return recording


def _loss(recording: Recording, case: str, name: str, batch: Batch, call: dict[str, Any], metrics: bool = True) -> None:
    stand_in = trainer(batch, **call)
    inputs = {
        "prompt_ids": torch.zeros(len(batch["mask"]), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(batch["mask"]), 1, dtype=torch.long),
        "completion_ids": torch.zeros(batch["mask"].shape, dtype=torch.long),
        "completion_mask": batch["mask"].double(),
        "advantages": batch["advantage"],
        "old_per_token_logps": batch["proximal"],
        "ref_per_token_logps": batch["reference"],
        "num_items_in_batch": batch["mask"].sum().double(),
    }
    if "off_policy_mask_threshold" in call or call.get("sampling"):
        inputs["sampling_per_token_logps"] = batch["behavior"]
    if call.get("sampling"):
        inputs["importance_sampling_ratio"] = importance_ratio(batch, call["sampling"])

    def loss(logp: torch.Tensor) -> torch.Tensor:
        stand_in._get_per_token_logps_and_entropies = lambda *_, **__: (logp, batch["entropy"], None)
        return GRPOTrainer._compute_loss(stand_in, stand_in.model, inputs)

    value, gradient = with_gradient(loss, batch["current"])
    result = {key: values[-1] for key, values in stand_in._metrics["train"].items()} if metrics else {}
    recording.add(case, name, call, loss=value, gradient=gradient, **result)
