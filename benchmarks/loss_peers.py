"""The losses of TRL and verl as installed, in our terms: docs/results/data/losses.csv."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from trl import GRPOTrainer, RLOOTrainer
from trl.experimental.gmpo.gmpo_trainer import GMPOTrainer
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.workers.config.actor import PolicyLossConfig

from trimtab.check_loss.check import Answer, check
from trimtab.check_loss.differences import Difference
from trimtab.check_loss.probes import Loss
from trimtab.check_loss.signatures import of_function

OF_BEHAVIOR = {"behavior": "old_log_prob"}
EXPECTED = {"nan", "exponent"}
"""What nearly all of them have, and docs/results/losses.md says."""
TOGETHER = ("two micro-batches together give ", " times the gradient of the whole")
"""What docs/results/losses.md says of `micro-batches`."""


@dataclass
class Case:
    """settings: in words. arguments: as `--arguments`. weights: of verl's correction, which its trainer computes."""

    loss: str
    settings: str
    function: Any
    arguments: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, Any] = field(default_factory=dict)


def trl_cases() -> Iterator[Case]:
    settings: list[dict[str, Any]] = [
        *({"loss_type": name} for name in ("grpo", "bnpo")),
        {"loss_type": "dapo", "epsilon_high": 0.28},
        {"loss_type": "dr_grpo", "max_completion_length": 1024},
        {"loss_type": "cispo"},
        {"loss_type": "cispo", "epsilon_high": 5.0},
        *({"loss_type": name} for name in ("sapo", "vespo", "luspo")),
        {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 2e-3, "epsilon_high": 2.5e-3},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 2e-3, "epsilon_high": 2.5e-3},
        {"loss_type": "cispo", "importance_sampling_level": "sequence", "epsilon_high": 5.0},
        {"loss_type": "grpo", "delta": 1.5},
        {"loss_type": "grpo", "delta": 1.1},
        {"loss_type": "grpo", "off_policy_mask_threshold": 0.05},
        {"loss_type": "dapo", "beta": 0.04, "use_bias_correction_kl": False},
        {"loss_type": "dapo", "beta": 0.04, "use_bias_correction_kl": True},
    ]
    for one in settings:
        words = ", ".join(f"{key}={value}" for key, value in one.items() if key != "loss_type")
        yield Case(f"TRL `{one['loss_type']}`", words, GRPOTrainer._compute_loss, one)
    yield Case("TRL, GMPOTrainer", "epsilon=0.4", GMPOTrainer._compute_loss, {"epsilon": 0.4})
    yield Case("TRL, RLOOTrainer", "", RLOOTrainer._compute_loss)


def verl_cases() -> Iterator[Case]:
    small = {"config.clip_ratio_low": 2e-3, "config.clip_ratio_high": 2.5e-3}
    tv, kl, four = (dict.fromkeys(("config.clip_ratio_low", "config.clip_ratio_high"), x) for x in (0.15, 0.05, 0.4))
    token = {"rollout_is": "token", "rollout_is_threshold": 2.0}
    cases: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
        ("vanilla", "", {}, {}),
        ("vanilla", "clip_ratio=0.1 alone", {"config.clip_ratio": 0.1}, {}),
        ("vanilla", "seq-mean-token-mean", {"loss_agg_mode": "seq-mean-token-mean"}, {}),
        ("vanilla", "seq-mean-token-sum-norm", {"loss_agg_mode": "seq-mean-token-sum-norm"}, {}),
        ("vanilla", "token weights, 2", {}, token),
        ("vanilla", "sequence weights, 2", {}, {"rollout_is": "sequence", "rollout_is_threshold": 2.0}),
        ("vanilla", "token weights, 0.5_5.0", {}, {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}),
        ("dppo_tv", "bound 0.15", OF_BEHAVIOR | tv, {}),
        ("dppo_tv", "bound 0.15, clip_ratio_c=20", OF_BEHAVIOR | tv | {"config.clip_ratio_c": 20.0}, {}),
        ("dppo_kl", "bound 0.05", OF_BEHAVIOR | kl, {}),
        ("gspo", "seq-mean-token-mean", small | {"loss_agg_mode": "seq-mean-token-mean"}, {}),
        ("sapo", "token-mean", {}, {}),
        ("gpg", "", {}, {}),
        ("clip_cov", "", {}, {}),
        ("kl_cov", "", {}, {}),
        ("geo_mean", "0.4", four, {}),
        ("cispo", "", {}, {}),
        ("cispo", "1.0/4.0", {"config.clip_ratio_low": 1.0, "config.clip_ratio_high": 4.0}, {}),
    ]
    for mode, words, arguments, weights in cases:
        given = {"loss_agg_mode": "token-mean", **arguments}
        if mode in ("clip_cov", "kl_cov"):
            given["config.policy_loss"] = PolicyLossConfig(loss_mode=mode)
        yield Case(f"verl `{mode}`", words, core_algos.get_policy_loss_fn(mode), given, weights)
    dro = PolicyLossConfig(loss_mode="dro", dro_beta=0.1)
    yield Case(
        "verl `dro`",
        "dro_beta=0.1",
        core_algos.get_policy_loss_fn("dro"),
        {"config.policy_loss": dro, "loss_agg_mode": "token-mean"},
    )
    for loss_type, more in (("ppo_clip", {}), ("reinforce", {"rollout_is": "token", "rollout_is_threshold": 2.0})):
        correction = RolloutCorrectionConfig(
            **{"rollout_is": None, "rollout_rs": None, "bypass_mode": True, "loss_type": loss_type, **more}
        )
        policy = PolicyLossConfig(loss_mode="bypass_mode", rollout_correction=correction)
        given = OF_BEHAVIOR | {"config.policy_loss": policy, "loss_agg_mode": "token-mean"}
        words = f"{loss_type}{', token weights, 2' if more else ''}"
        yield Case("verl `bypass_mode`", words, core_algos.get_policy_loss_fn("bypass_mode"), given)


def loss_of(case: Case) -> Loss:
    def weighted(
        old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, loss_agg_mode: str,
        config: Any, rollout_log_probs: Tensor,
    ) -> Any:  # fmt: skip
        log = (old_log_prob - rollout_log_probs).detach()
        weights, _ = rollout_corr_helper.compute_rollout_correction_weights(log, response_mask, **case.weights)
        given = (old_log_prob, log_prob, advantages, response_mask, loss_agg_mode)
        return case.function(*given, config=config, rollout_is_weights=weights)

    return of_function(weighted if case.weights else case.function, case.arguments, case.loss)


def short(one: Difference) -> str:
    """Returns the sentence without what to change, which the code of others is not ours to change."""
    if one.kind == "micro-batches":
        return one.text.rpartition(": ")[0].removeprefix(TOGETHER[0]).removesuffix(TOGETHER[1])
    advised = one.kind not in ("zero-advantage", "shape", "kink", "unexplained", "value")
    return one.text.rpartition(": ")[0] if advised else one.text


def row(case: Case) -> list[str]:
    answer: Answer = check(loss_of(case), ignore=sorted(EXPECTED))
    nearest = answer.nearest[0]
    differing = "; ".join(f"{one.kind}: {short(one)}" for one in nearest.differences) or "equal"
    return [case.loss, case.settings, f"`{', '.join(nearest.lines).removeprefix('name = ')}`", differing]


def table() -> list[list[str]]:
    head = ["loss", "settings", "nearest objective", "what differs"]
    return [head, *(row(case) for case in (*trl_cases(), *verl_cases()))]
