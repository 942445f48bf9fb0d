"""What verl computes: rollout correction (weights, rejection, metrics), losses, aggregation, KL, advantages."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import torch
from generate import Batch, Recording, each, with_gradient
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.workers.config import ActorConfig
from verl.workers.config.actor import PolicyLossConfig

AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")

WEIGHTS: dict[str, dict[str, Any]] = {
    "token-2": {"rollout_is": "token", "rollout_is_threshold": 2.0},
    "token-1.2": {"rollout_is": "token", "rollout_is_threshold": 1.2},
    "token-1.2-normalized": {"rollout_is": "token", "rollout_is_threshold": 1.2, "rollout_is_batch_normalize": True},
    "sequence-2": {"rollout_is": "sequence", "rollout_is_threshold": 2.0},
    "sequence-10": {"rollout_is": "sequence", "rollout_is_threshold": 10.0},
    "sequence-2-normalized": {
        "rollout_is": "sequence",
        "rollout_is_threshold": 2.0,
        "rollout_is_batch_normalize": True,
    },
    "token-icepop-0.5-5": {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"},
    "token-icepop-0.9-1.2": {"rollout_is": "token", "rollout_is_threshold": "0.9_1.2"},
    "sequence-icepop-0.5-2": {"rollout_is": "sequence", "rollout_is_threshold": "0.5_2.0"},
}

# A single number u means [1/u, u] for the k1 rules: such bounds are the same for a ratio and for its inverse.
REJECTIONS: dict[str, str] = {
    "token_k1": "1.2",
    "token_k2": "0.01",
    "token_k3": "0.01",
    "seq_sum_k1": "2.0",
    "seq_sum_k2": "0.1",
    "seq_sum_k3": "0.1",
    "seq_mean_k1": "1.01",
    "seq_mean_k2": "0.01",
    "seq_mean_k3": "0.01",
    "seq_max_k2": "0.05",
    "seq_max_k3": "0.05",
    "token_k1,seq_mean_k3": "2.0,0.02",
}


def actor(**changes: Any) -> ActorConfig:
    """A config with verl's clip defaults of 0.2; `optim` is absent because nothing here takes a step."""
    return ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, optim=None, **changes)


def record(batches: dict[str, Batch]) -> Recording:
    versions = {name: importlib.metadata.version(name) for name in ("verl", "torch")}
    recording = Recording(versions)
    for name, batch in each(batches):
        _weights(recording, name, batch)
        _rejections(recording, name, batch)
        _losses(recording, name, batch)
        _parts(recording, name, batch)
    for name, batch in each(batches, "bounds"):
        for option in ("token_k1", "seq_mean_k1"):
            _reject(recording, f"rejection/asymmetric/{option}", name, batch, option, "0.99_1.001")
    for name, batch in each(batches, "empty"):
        _metrics(recording, name, batch)
        far = batch | {"reference": batch["current"] + 4.0 * batch["mask"]}
        _kl(recording, "kl/k3-far", name, far, "k3")
        alone = torch.tensor([0, 0, 0, 1])
        _advantage(recording, "advantage/grpo-alone", name, batch | {"groups": alone}, {})
        _token_baseline(recording, name, batch | {"groups": alone})
        for aggregation in AGGREGATIONS:
            _vanilla(recording, f"loss/vanilla/{aggregation}", name, batch, aggregation)
    return recording


def _metrics(recording: Recording, name: str, batch: Batch) -> None:
    result = rollout_corr_helper.compute_offpolicy_metrics(batch["proximal"], batch["behavior"], batch["mask"].double())
    recording.add("metrics", name, {}, **result)


def _weights(recording: Recording, name: str, batch: Batch) -> None:
    _metrics(recording, name, batch)
    for case, call in WEIGHTS.items():
        try:
            weights, metrics = rollout_corr_helper.compute_rollout_correction_weights(
                batch["proximal"] - batch["behavior"], batch["mask"].double(), **call
            )
        except ZeroDivisionError as error:  # its ESS when no weight is left
            recording.add(f"weights/{case}", name, call, raised=f"ZeroDivisionError: {error}")
            continue
        recording.add(f"weights/{case}", name, call, weights=weights * batch["mask"], **metrics)


def _reject(recording: Recording, case: str, name: str, batch: Batch, option: str, threshold: str) -> None:
    keep, metrics = rollout_corr_helper.compute_rollout_rejection_mask(
        batch["proximal"] - batch["behavior"], batch["mask"].double(), option, threshold
    )
    call = {"rollout_rs": option, "rollout_rs_threshold": threshold}
    recording.add(case, name, call, keep=keep.bool(), **metrics)


def _rejections(recording: Recording, name: str, batch: Batch) -> None:
    for option, threshold in REJECTIONS.items():
        _reject(recording, f"rejection/{option}", name, batch, option, threshold)


def _vanilla(
    recording: Recording,
    case: str,
    name: str,
    batch: Batch,
    aggregation: str,
    mask: torch.Tensor | None = None,
    **call: Any,
) -> None:
    weights = call.pop("rollout_is_weights", None)
    mask = batch["mask"].double() if mask is None else mask
    metrics: dict[str, Any] = {}

    def loss(logp: torch.Tensor) -> torch.Tensor:
        value, result = core_algos.compute_policy_loss_vanilla(
            batch["proximal"],
            logp,
            batch["advantage"].expand_as(logp),
            mask,
            aggregation,
            config=actor(**call),
            rollout_is_weights=weights,
        )
        metrics.update(result)
        return value

    value, gradient = with_gradient(loss, batch["current"])
    recording.add(case, name, {"loss_agg_mode": aggregation, **call}, loss=value, gradient=gradient, **metrics)


def _losses(recording: Recording, name: str, batch: Batch) -> None:
    mask = batch["mask"].double()
    log_ratio = batch["proximal"] - batch["behavior"]
    for aggregation in AGGREGATIONS:
        _vanilla(recording, f"loss/vanilla/{aggregation}", name, batch, aggregation)
    _vanilla(
        recording,
        "loss/vanilla/clip-0.1-0.28-dual-3",
        name,
        batch,
        "token-mean",
        clip_ratio_low=0.1,
        clip_ratio_high=0.28,
    )
    _vanilla(recording, "loss/vanilla/dual-1.1", name, batch, "token-mean", clip_ratio_high=0.05, clip_ratio_c=1.1)
    for case in ("token-2", "sequence-2", "token-1.2-normalized", "sequence-2-normalized", "token-icepop-0.9-1.2"):
        weights, _ = rollout_corr_helper.compute_rollout_correction_weights(log_ratio, mask, **WEIGHTS[case])
        _vanilla(recording, f"loss/weighted/{case}", name, batch, "token-mean", rollout_is_weights=weights)
    for case, bound in {"rejected": "1.05", "all-rejected": "1.0001"}.items():
        kept, _ = rollout_corr_helper.compute_rollout_rejection_mask(log_ratio, mask, "seq_mean_k1", bound)
        if bool(kept.any()) == (case == "all-rejected"):
            continue
        for aggregation in AGGREGATIONS[:3]:
            _vanilla(recording, f"loss/{case}/{aggregation}", name, batch, aggregation, mask=kept)
    _registered(
        recording, "loss/gspo", name, batch, core_algos.compute_policy_loss_gspo, "seq-mean-token-mean", 3e-4, 4e-4
    )
    _registered(
        recording, "loss/gspo/token-mean", name, batch, core_algos.compute_policy_loss_gspo, "token-mean", 3e-4, 4e-4
    )
    _registered(recording, "loss/cispo", name, batch, core_algos.compute_policy_loss_cispo, "token-mean", 0.2, 0.2)
    _registered(
        recording, "loss/cispo/ceiling-1.1", name, batch, core_algos.compute_policy_loss_cispo, "token-mean", 1.0, 0.1
    )
    # DPPO takes `old_log_prob` for the sampler's, as in bypass mode.
    sampled = batch | {"proximal": batch["behavior"]}
    for mode, bound in (("dppo_tv", 0.15), ("dppo_tv", 0.02), ("dppo_kl", 0.05), ("dppo_kl", 0.002)):
        function = core_algos.get_policy_loss_fn(mode)
        _registered(recording, f"loss/{mode}/{bound}", name, sampled, function, "token-mean", bound, bound, 20.0)
    for mode, bound in (("sapo", 0.2), ("geo_mean", 0.4), ("geo_mean", 0.05)):
        function = core_algos.get_policy_loss_fn(mode)
        _registered(recording, f"loss/{mode}/{bound}", name, batch, function, "seq-mean-token-mean", bound, bound)
    _bypass(recording, name, batch)


def _registered(
    recording: Recording,
    case: str,
    name: str,
    batch: Batch,
    function: Any,
    aggregation: str,
    low: float,
    high: float,
    dual: float = 3.0,
) -> None:
    metrics: dict[str, Any] = {}

    def loss(logp: torch.Tensor) -> torch.Tensor:
        value, result = function(
            batch["proximal"],
            logp,
            batch["advantage"].expand_as(logp),
            batch["mask"].double(),
            aggregation,
            config=actor(clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=dual),
        )
        metrics.update(result)
        return value

    value, gradient = with_gradient(loss, batch["current"])
    call = {"loss_agg_mode": aggregation, "clip_ratio_low": low, "clip_ratio_high": high}
    recording.add(case, name, call, loss=value, gradient=gradient, **metrics)


def _bypass(recording: Recording, name: str, batch: Batch) -> None:
    cases = {
        "ppo": RolloutCorrectionConfig(rollout_is=None, rollout_rs=None, bypass_mode=True, loss_type="ppo_clip"),
        "reinforce-token-2": RolloutCorrectionConfig(
            rollout_is="token", rollout_is_threshold=2.0, rollout_rs=None, bypass_mode=True, loss_type="reinforce"
        ),
    }
    for case, correction in cases.items():
        config = actor(
            policy_loss=PolicyLossConfig(loss_mode="bypass_mode", rollout_correction=correction), clip_ratio_c=10.0
        )

        def loss(logp: torch.Tensor, config: ActorConfig = config) -> torch.Tensor:
            return core_algos.compute_policy_loss_bypass_mode(
                batch["behavior"],
                logp,
                batch["advantage"].expand_as(logp),
                batch["mask"].double(),
                "token-mean",
                config=config,
            )[0]

        value, gradient = with_gradient(loss, batch["current"])
        recording.add(f"loss/bypass/{case}", name, {"clip_ratio_c": 10.0}, loss=value, gradient=gradient)


def _kl(recording: Recording, case: str, name: str, batch: Batch, kind: str) -> None:
    def loss(logp: torch.Tensor) -> torch.Tensor:
        penalty = core_algos.kl_penalty(logp, batch["reference"], kind)
        return core_algos.agg_loss(penalty, batch["mask"].double(), "token-mean")

    value, gradient = with_gradient(loss, batch["current"])
    recording.add(case, name, {"kl_penalty": kind}, loss=value, gradient=gradient)


def _advantage(recording: Recording, case: str, name: str, batch: Batch, call: dict[str, Any]) -> None:
    function = core_algos.compute_grpo_outcome_advantage
    if case == "advantage/rloo":
        function = core_algos.compute_rloo_outcome_advantage
    scores = batch["rewards"][:, None].clone()
    advantages, _ = function(scores, torch.ones_like(scores), batch["groups"].numpy(), **call)
    recording.add(case, name, call, advantages=advantages)


def _token_baseline(recording: Recording, name: str, batch: Batch) -> None:
    """The optimal token baseline, with and without a baseline of zero where one response is left.

    The function for several turns counts trained tokens; that for one turn counts columns, which is the same without
    holes in the mask. Sums of squares that belong to some distribution: p^2 plus a share of (1 - p)^2.
    """
    mask, probability = batch["mask"], batch["behavior"].exp()
    columns = torch.arange(mask.shape[1])
    last = torch.where(mask, columns, -1).amax(dim=1, keepdim=True)
    squares = probability.square() + (1 - probability).square() * (-batch["entropy"]).exp()
    functions = {"multi": core_algos.compute_multi_turn_optimal_token_baseline_advantage}
    if bool((mask == (columns <= last)).all()):
        functions["single"] = core_algos.compute_optimal_token_baseline_advantage
    for turns, function in functions.items():
        for zero_tail in (True, False):
            advantages, _ = function(
                torch.where(columns == last, batch["rewards"][:, None], 0.0),
                mask.double(),
                batch["groups"].numpy(),
                batch["behavior"],
                squares,
                handle_zero_tail=zero_tail,
            )
            case = f"advantage/optimal-token/{turns}/{'zero' if zero_tail else 'own'}-tail"
            recording.add(case, name, {"handle_zero_tail": zero_tail}, advantages=advantages)


def _parts(recording: Recording, name: str, batch: Batch) -> None:
    for kind in ("k1", "k2", "k3"):
        _kl(recording, f"kl/{kind}", name, batch, kind)
    _advantage(recording, "advantage/grpo", name, batch, {})
    _advantage(recording, "advantage/dr-grpo", name, batch, {"norm_adv_by_std_in_grpo": False})
    _advantage(recording, "advantage/rloo", name, batch, {})
    _token_baseline(recording, name, batch)
