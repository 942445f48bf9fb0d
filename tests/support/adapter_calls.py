"""The loss of each adapter, called as its trainer calls it, on one batch for all of them."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from tests.support.peer_modules import NEMO_RL_LOSS
from torch import Tensor

from trimtab.adapters import areal, nemo_rl, openrlhf, prime_rl, skyrl, slime, tinker, verl_loss
from trimtab.objectives import objective

Batch = Mapping[str, Any]
"""Tensors (batch, time): behavior, proximal, mask (bool), advantage (or (batch, 1)); and optionally age, reference,
unfiltered (NeMo-RL's log-probs without top-k and top-p) and the number of the step."""

WHOLE = (slice(None),)
HALVES = (slice(0, 3), slice(3, None))
Called = tuple[Tensor, dict[str, Any]]


def wide(batch: Batch, current: Tensor) -> Tensor:
    """The advantages, (batch, time)."""
    return batch["advantage"].to(current.dtype).expand(current.shape)


def call_verl(batch: Batch, current: Tensor, name: str, parts: Sequence[slice], given: dict[str, Any]) -> Called:
    """The parts are on two ranks, whose gradients are averaged; log-probs are carried as weights."""
    kind, keywords = objective(name, **given).aggregation.kind, dict(given)
    factor = keywords.pop("length_max", None)
    counts = {"batch_num_tokens": int(batch["mask"].sum()), "global_batch_size": len(current), "dp_size": 2}
    section = SimpleNamespace(trimtab=keywords)
    config = SimpleNamespace(global_batch_info=counts, loss_scale_factor=factor, policy_loss=section)
    loss = verl_loss.PolicyLoss(name)
    results = [
        loss(
            batch["proximal"][part],
            current[part],
            wide(batch, current)[part],
            batch["mask"][part].float(),
            loss_agg_mode=verl_loss.MODES.get(kind, kind),
            config=config,
            rollout_is_weights=batch["behavior"][part],
        )
        for part in parts
    ]
    return torch.stack([value for value, _ in results]).sum() / 2, results[-1][1]


def prime_rl_sequence(batch: Batch, current: Tensor, row: int, weights: Tensor | None = None) -> SimpleNamespace:
    return SimpleNamespace(
        trainer_logprobs=current[row],
        inference_logprobs=batch["behavior"][row],
        ref_logprobs=None,
        advantages=wide(batch, current)[row],
        loss_mask=batch["mask"][row],
        loss_weights=weights,
    )


def call_prime_rl(
    batch: Batch, current: Tensor, name: str, _: Sequence[slice], given: dict[str, Any], **records: Any
) -> Called:
    """Sequence by sequence. A batch of prime-rl is one update: the policy at its start is the current one."""
    results = [
        prime_rl.loss(prime_rl_sequence(batch, current, row), objective=name, **given, **records)
        for row in range(len(current))
    ]
    return torch.stack([one.loss for one in results]).sum() / batch["mask"].sum(), dict(results[-1].metrics)


def call_skyrl(
    batch: Batch, current: Tensor, name: str, parts: Sequence[slice], given: dict[str, Any], **records: Any
) -> Called:
    """The advantages are scaled as SkyRL does."""
    kind = objective(name, **given).aggregation.kind
    reduction, longest = skyrl.REDUCTIONS.get(kind, "token_mean"), given.get("length_max")
    mask, rows = batch["mask"], len(current)
    scale = {
        "token_mean": 1 / mask.sum().double(),
        "sequence_mean": 1 / (rows * mask.sum(1, keepdim=True)).double(),
        "seq_mean_token_sum_norm": torch.tensor(1 / (rows * (longest or 1)), dtype=torch.float64),
    }[reduction]
    config = SimpleNamespace(loss_reduction=reduction, max_seq_len=longest, off_policy_correction=None)
    loss = skyrl.policy_loss(name, **given, **records)
    advantage = (batch["advantage"] * scale).to(current.dtype).expand(current.shape)
    results = [
        loss(
            current[part], batch["proximal"][part], advantage[part], config, mask[part].float(), batch["behavior"][part]
        )
        for part in parts
    ]
    return torch.stack([value for value, _ in results]).sum(), results[-1][1]


def nemo_rl_data(batch: Batch, current: Tensor) -> dict[str, Tensor]:
    """Of a whole update: each value belongs to the token before."""
    names = {
        "token_mask": "mask",
        "advantages": "advantage",
        "prev_logprobs": "proximal",
        "generation_logprobs": "behavior",
        "reference_policy_logprobs": "reference",
    }
    columns = {
        theirs: torch.nn.functional.pad(batch[ours].expand(current.shape).to(current.dtype), (1, 0))
        for theirs, ours in names.items()
        if ours in batch
    }
    columns |= {"curr_logprobs_unfiltered": batch["unfiltered"]} if "unfiltered" in batch else {}
    return columns | {"sample_mask": torch.ones(len(current))}


def call_nemo_rl(
    batch: Batch, current: Tensor, name: str, parts: Sequence[slice], given: dict[str, Any], **records: Any
) -> Called:
    """The metrics are those of the whole update, which NeMo-RL adds up."""
    columns = nemo_rl_data(batch, current)
    loss = nemo_rl.ObjectiveLoss(name, replaces=NEMO_RL_LOSS, **given, **records)
    counts = (torch.tensor(len(current)), batch["mask"].sum())
    results = [loss(current[part], {key: value[part] for key, value in columns.items()}, *counts) for part in parts]
    metrics = {key: sum(one[key] for _, one in results) for key in results[0][1]}
    assert metrics.keys() <= loss.metric_normalizations.keys()
    return torch.stack([value for value, _ in results]).sum(), metrics


def lists(tensor: Tensor) -> list[Tensor]:
    """Responses of different lengths, cut from a padded batch."""
    return [row[: 4 + index % 3] for index, row in enumerate(tensor)]


def call_slime(
    batch: Batch, current: Tensor, name: str, _: Sequence[slice], given: dict[str, Any], monitor: Any = None
) -> Called:
    cut = batch.get("cut", list)
    tokens = objective(name, **given).aggregation.kind == "token-mean"
    args = Namespace(trimtab_objective={"name": name, **given}, calculate_per_token_loss=tokens)
    args.trimtab_monitor = monitor
    scored, masks = cut(current), cut(batch["mask"].int())
    lengths = [len(one) for one in scored]
    fields = {
        "response_lengths": lengths,
        "total_lengths": lengths,
        "unconcat_tokens": scored,
        "loss_masks": masks,
        "advantages": cut(wide(batch, current)),
        "log_probs": cut(batch["proximal"]),
        "rollout_log_probs": cut(batch["behavior"]),
    }
    loss, metrics = slime.loss(args, fields, current, lambda flat: flat.sum() * 0 + 1)
    return loss / (sum(int(mask.sum()) for mask in masks) if tokens else len(current)), metrics


def areal_row(batch: Batch, current: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A packed row, as AReaL trains, and options. A version is that of the token itself, the rest of the next one."""
    step = batch.get("step", 9)
    data = {
        "logprobs": batch["behavior"].reshape(-1),
        "prox_logp": batch["proximal"].reshape(-1),
        "advantages": wide(batch, current).reshape(-1),
        "loss_mask": batch["mask"].reshape(-1).float(),
        "cu_seqlens": torch.arange(0, current.numel() + 1, current.shape[1]),
    }
    age = batch.get("age", torch.ones(current.shape, dtype=torch.long))
    data["versions"] = (step + 1 - age).reshape(-1).roll(1)
    return data, {"eps_clip": 0.2, "current_version": step, "use_decoupled_loss": True}


def call_areal(
    batch: Batch, current: Tensor, name: str, _: Sequence[slice], given: dict[str, Any], **records: Any
) -> Called:
    data, options = areal_row(batch, current)
    loss = areal.actor_loss(name, **given, **records)
    return loss(current.reshape(-1), torch.zeros(current.numel()), data, **options), {}


def call_openrlhf(
    batch: Batch, current: Tensor, name: str, parts: Sequence[slice], given: dict[str, Any], **records: Any
) -> Called:
    """The parts are on two ranks, whose gradients are averaged."""
    loss = openrlhf.ObjectivePolicyLoss(name, **given, **records)
    counts = {"batch_num_tokens": float(batch["mask"].sum()), "global_batch_size": len(current), "dp_size": 2}
    results = [
        loss(
            current[part],
            batch["proximal"][part],
            wide(batch, current)[part],
            batch["mask"][part],
            batch["behavior"][part],
            **counts,
        )
        for part in parts
    ]
    assert all(number.isfinite() for number in results[-1][1:])
    return torch.stack([value for value, *_ in results]).sum() / 2, {}


def call_tinker(
    batch: Batch, current: Tensor, name: str, parts: Sequence[slice], given: dict[str, Any], **records: Any
) -> Called:
    cut = batch.get("cut", list)
    columns = {
        "logprobs": cut(batch["behavior"]),
        "advantages": cut(wide(batch, current)),
        "mask": cut(batch["mask"].float()),
        "old_logprobs": cut(batch["proximal"]),
    }
    loss = tinker.custom_loss(name, **given, **records)
    data = [
        SimpleNamespace(loss_fn_inputs={key: values[row] for key, values in columns.items()})
        for row in range(len(current))
    ]
    results = [loss(data[part], cut(current)[part]) for part in parts]
    return torch.stack([value for value, _ in results]).sum(), results[-1][1]


def call_tis(
    args: Namespace, pg_loss: Tensor, train: Iterable[Tensor], rollout: Iterable[Tensor], masks: Iterable[Tensor]
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """slime's hook of corrections, with whole responses (time,) each."""
    logps = list(train)
    return slime.tis(
        args,
        pg_loss=pg_loss,
        train_log_probs=logps,
        rollout_log_probs=list(rollout),
        loss_masks=list(masks),
        response_lengths=[len(one) for one in logps],
    )


CALLS: dict[str, Callable[..., Called]] = {
    "verl": call_verl,
    "prime-rl": call_prime_rl,
    "skyrl": call_skyrl,
    "nemo-rl": call_nemo_rl,
    "tinker": call_tinker,
    "slime": call_slime,
    "areal": call_areal,
    "openrlhf": call_openrlhf,
}
"""Each takes the batch, the current log-probs, the name of an objective, the micro-batches, keywords of the objective,
and `monitor` or `dump`; and returns the loss of the update and metrics. prime-rl, slime and AReaL take it whole."""
