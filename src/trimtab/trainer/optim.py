"""AdamW, gradient clipping, checks for finite weights, repeatable gradients, and the learning rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from trimtab.errors import DivergedError
from trimtab.trainer.config import OptimConfig
from trimtab.trainer.models.sharding import local_shard
from trimtab.trainer.ranks import RankGroup


class NonFiniteUpdateError(DivergedError):
    """Loss, gradient or weights are not finite, and training cannot continue.

    `weights_are_good`: all bad updates were skipped, so the weights can still be saved. `advice`: what to change.
    """

    def __init__(self, message: str, *, weights_are_good: bool, advice: str = "") -> None:
        super().__init__(message)
        self.weights_are_good = weights_are_good
        self.advice = advice or "lower optim.lr or choose a stricter correction"


def build_optimizer(
    parameters: Iterable[torch.nn.Parameter], config: OptimConfig, modules: Iterable[tuple[torch.nn.Module, float]] = ()
) -> torch.optim.AdamW:
    """Returns fused AdamW over the trainable parameters (on a CPU about six times faster than a loop over tensors).

    `modules`: further modules, each with a constant learning rate. They have no weight decay: it would pull a log sigma
    towards 0, which is sigma = 1.
    """
    groups: list[dict[str, Any]] = [{"params": [parameter for parameter in parameters if parameter.requires_grad]}]
    groups += [{"params": list(module.parameters()), "lr": lr, "weight_decay": 0.0} for module, lr in modules]
    return torch.optim.AdamW(
        groups, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay, fused=True
    )


def learning_rate(config: OptimConfig, update: int, total: int) -> float:
    """Returns the rate of update `update` (from 0) of `total`: linear warm-up, then constant or cosine to `min_lr`."""
    if update < config.warmup:
        return config.lr * (update + 1) / config.warmup
    if config.schedule != "cosine":
        return config.lr
    progress = min(1.0, (update - config.warmup) / max(1, total - config.warmup))
    return config.min_lr + (config.lr - config.min_lr) * 0.5 * (1.0 + math.cos(math.pi * progress))


def linear_decay(update: int, start: int, total: int) -> float:
    """Returns a factor of the learning rate: 1 up to update `start`, then linearly to 0 after the last of `total`."""
    return min(1.0, max(0.0, (total - update) / max(1, total - start)))


def clip_gradient(parameters: Sequence[torch.nn.Parameter], bound: float, ranks: RankGroup) -> float:
    """Clips the gradient in place to a norm of `bound`; returns its norm before clipping, over all shards."""
    if ranks.size == 1:
        return float(torch.nn.utils.clip_grad_norm_(parameters, bound))
    grads = [local_shard(parameter.grad) for parameter in parameters if parameter.grad is not None]
    norm = math.sqrt(ranks.all_reduce_sum(float(torch.nn.utils.get_total_norm(grads)) ** 2))
    factor = bound / (norm + 1e-6)
    if factor < 1:
        for grad in grads:
            grad.mul_(factor)
    return norm


def check_weights(parameters: Sequence[torch.nn.Parameter], ranks: RankGroup) -> None:
    """Raises `NonFiniteUpdateError` if a finite gradient made weights overflow: they must not be saved."""
    weights = [local_shard(parameter).detach() for parameter in parameters]
    # The maximum norm cannot overflow but is slow on a CPU: it is computed only if the sum of squares overflows.
    finite = any(bool(torch.nn.utils.get_total_norm(weights, power).isfinite()) for power in (2.0, math.inf))
    if ranks.all_reduce_sum(float(not finite)):
        raise NonFiniteUpdateError("an update made the weights non-finite", weights_are_good=False)


@contextmanager
def repeatable(device: torch.device) -> Iterator[None]:
    """Makes a GPU add the gradients of repeated rows in a fixed order inside, so that runs repeat bit for bit.

    The setting holds for the whole process. PyTorch warns of operations that have no deterministic version.
    """
    if device.type != "cuda" or torch.are_deterministic_algorithms_enabled():
        yield
        return
    settings: Any = torch.utils.deterministic
    filled = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = False  # True would write every new tensor twice
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        settings.fill_uninitialized_memory = filled
