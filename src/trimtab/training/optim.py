"""AdamW, and the learning rate as a pure function of update, step and length surge.

Resuming needs no scheduler state but that one step (`trimtab.training.features.length_surge`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from trimtab.config import OptimConfig, SurgeConfig
from trimtab.models.sharding import local
from trimtab.training.ranks import Ranks

# 1.8 times a whole number, in floating point, may lie a hair above the whole number of steps it stands for.
_ROUNDING = 1e-9


def build_optimizer(
    parameters: Iterable[torch.nn.Parameter],
    config: OptimConfig,
    noise: Iterable[torch.nn.Parameter] = (),
    noise_lr: float = 0.0,
) -> torch.optim.AdamW:
    """Fused AdamW over the trainable parameters (about six times faster than the loop over tensors on a CPU).

    `noise`: parameters with a constant rate of their own and no decay, which would pull log sigma towards sigma = 1.
    """
    groups: list[dict[str, Any]] = [{"params": [parameter for parameter in parameters if parameter.requires_grad]}]
    if scales := list(noise):
        groups.append({"params": scales, "lr": noise_lr, "weight_decay": 0.0})
    return torch.optim.AdamW(
        groups,
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


def learning_rate(config: OptimConfig, update: int, total: int) -> float:
    """Rate of update `update` (from 0) out of `total`: linear warm-up, then constant or cosine down to `min_lr`.

    The `surge` schedule is constant here; `surge_share` lowers it.
    """
    if update < config.warmup:
        return config.lr * (update + 1) / config.warmup
    if config.schedule != "cosine":
        return config.lr
    progress = min(1.0, (update - config.warmup) / max(1, total - config.warmup))
    return config.min_lr + (config.lr - config.min_lr) * 0.5 * (1.0 + math.cos(math.pi * progress))


def surge_share(config: SurgeConfig, step: int, surge: int | None) -> float:
    """Share of the rate in step `step` (from 1) of a run whose lengths surged at step `surge`; its updates share it.

    max(floor, 2^-⌊(step - surge) / P⌋), P = period x surge steps: nothing halves before surge + P (arXiv 2602.01826
    with the constants of its reproduction; the phase of the first halving is uncertain). None: no surge yet.
    """
    if surge is None or step <= surge:
        return 1.0
    halvings = math.floor((step - surge) / (config.period * surge) + _ROUNDING)
    return max(config.floor, 2.0**-halvings)


def first_halving(config: SurgeConfig, surge: int) -> int:
    """The first step with a lower rate."""
    return surge + max(1, math.ceil(config.period * surge - _ROUNDING))


def clip_gradient(parameters: Sequence[torch.nn.Parameter], bound: float, ranks: Ranks) -> float:
    """Scale the gradient down to a norm of `bound` where it is larger; returns its norm over all ranks' parts."""
    if ranks.size == 1:
        return float(torch.nn.utils.clip_grad_norm_(parameters, bound))
    grads = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    norm = math.sqrt(ranks.total(float(torch.nn.utils.get_total_norm(grads)) ** 2))
    share = bound / (norm + 1e-6)
    if share < 1:
        for grad in grads:
            grad.mul_(share)
    return norm


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the scheduled rate; the group of the noise keeps its constant one."""
    optimizer.param_groups[0]["lr"] = lr
