"""Losses of public reports in a few lines: what they were called, and the differences that name them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def clipped(current: Tensor, proximal: Tensor, advantage: Tensor, high: float = 1.2) -> Tensor:
    ratio = (current - proximal).clamp(-20, 20).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, high) * advantage)


def dapo_accumulated(current: Any, proximal: Any, mask: Any, advantage: Any, tokens: Any, parts: Any) -> Tensor:
    """Divided by the tokens of the update, and by the accumulation steps again."""
    return torch.where(mask, clipped(current, proximal, advantage, 1.28), 0.0).sum() / tokens / parts


def dr_grpo_of_micro_batch(current: Any, proximal: Any, mask: Any, advantage: Any) -> Tensor:
    """Divided by rows and width of the micro-batch."""
    return torch.where(mask, clipped(current, proximal, advantage), 0.0).sum() / mask.numel()


def grpo_unbounded(current: Any, proximal: Any, mask: Any, advantage: Any, responses: Any) -> Tensor:
    """exp of any log-ratio."""
    ratio = torch.where(mask, current - proximal, 0.0).exp()
    loss = torch.where(mask, -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage), 0.0)
    return (loss.sum(1) / mask.sum(1).clamp(min=1)).sum() / responses


def tis_with_gradient(current: Any, proximal: Any, behavior: Any, mask: Any, advantage: Any, tokens: Any) -> Tensor:
    """The weight is taken from the live policy and not detached."""
    weight = torch.where(mask, current - behavior, 0.0).clamp(-20, 20).exp().clamp(max=2)
    return torch.where(mask, weight * clipped(current, proximal, advantage), 0.0).sum() / tokens


def cispo_with_floor(current: Any, proximal: Any, mask: Any, advantage: Any, tokens: Any) -> Tensor:
    """clamp(1 - 0, 1 + 5): a floor of 1."""
    ratio = torch.where(mask, current - proximal, 0.0).clamp(-20, 20).exp().detach().clamp(1, 6)
    return torch.where(mask, -ratio * advantage * current, 0.0).sum() / tokens


def k3_mask_of_inverse(current: Any, proximal: Any, behavior: Any, mask: Any, advantage: Any, tokens: Any) -> Tensor:
    """k3 of mu/pi_old in place of pi_old/mu."""
    log = torch.where(mask, behavior - proximal, 0.0)
    k3 = ((log.exp() - log) - 1).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    return torch.where(mask & (k3 <= 0.01), clipped(current, proximal, advantage), 0.0).sum() / tokens


REPORTS: list[tuple[str, str, Callable[..., Tensor], set[str]]] = [
    ("huggingface/trl#5619", "dapo", dapo_accumulated, {"micro-batches"}),
    ("verl-project/verl#3741", "dr-grpo", dr_grpo_of_micro_batch, {"denominator", "micro-batches"}),
    ("OpenRLHF/OpenRLHF#1293", "grpo", grpo_unbounded, {"exponent"}),
    ("a weight that carries a gradient", "token-tis", tis_with_gradient, {"live-weight"}),
    ("NovaSky-AI/SkyRL#1928", "cispo", cispo_with_floor, {"kink"}),
    ("verl's k3 of the inverse ratio", "k3-mask", k3_mask_of_inverse, {"inverse"}),
]
