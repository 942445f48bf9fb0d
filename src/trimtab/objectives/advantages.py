"""Advantages from rewards, relative to the group or the batch: one value per response, no gradient, in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from trimtab.corrections.ratios import Number
from trimtab.errors import TrimtabError, did_you_mean

KINDS = ("grpo", "dr-grpo", "rloo", "optimal", "batch-mean")

STD_EPS = 1e-6


def advantages(
    kind: str,
    rewards: Tensor | Sequence[Number],
    groups: Tensor | Sequence[int],
    *,
    value_beta: Number | None = None,
) -> Float[Tensor, "batch 1"]:
    """Returns advantages (batch, 1) of `rewards` (batch,), relative to the rewards of the same group id (batch,).

        grpo     (r - mean) / (std + 1e-6), std with n - 1               arXiv 2402.03300
        dr-grpo  r - mean                                                arXiv 2503.20783
        rloo     r - mean of the others                                  arXiv 2402.14740
        batch-mean  r - mean over the batch, whatever the groups         FlashREINFORCE
        optimal  r - V, V = beta ln mean exp(r / beta), beta = value_beta (1.0)   OAPL, arXiv 2602.19362 eq. 2

    A group of equal rewards, or of one response, gives exactly 0. The dtype is that of the rewards (float32 for
    integers). Raises `TrimtabError` for an unknown kind, rewards that are not finite, and `value_beta` of another kind.
    """
    if kind not in KINDS:
        raise TrimtabError(f"unknown advantage {kind!r}{did_you_mean(kind, KINDS)}")
    if value_beta is not None and kind != "optimal":
        raise TrimtabError(f"value_beta has no effect with advantage {kind!r}; it belongs to 'optimal'")
    rewards = torch.as_tensor(rewards)
    values = rewards.detach().to(torch.float64)
    members = torch.as_tensor(groups, device=values.device)
    if values.ndim != 1 or members.shape != values.shape:
        raise TrimtabError(f"rewards {tuple(values.shape)} and groups {tuple(members.shape)} must both be (batch,)")
    if not bool(torch.isfinite(values).all()):
        raise TrimtabError("rewards must be finite: drop failed samples before computing advantages")
    if kind == "optimal":
        result = _optimal(values, members, 1.0 if value_beta is None else value_beta)
    elif kind == "batch-mean":
        result = _centered("dr-grpo", values, torch.zeros_like(members))
    else:
        result = _centered(kind, values, members)
    return result.to(rewards.dtype if rewards.dtype.is_floating_point else torch.float32).unsqueeze(1)


def _centered(kind: str, values: Tensor, members: Tensor) -> Tensor:
    group = torch.unique(members, return_inverse=True)[1]
    size = _per_group(torch.ones_like(values), group, "sum")
    # Subtracting the group's smallest reward first makes equal rewards exactly 0, without rounding.
    shifted = values - _per_group(values, group, "amin")
    centered = shifted - _per_group(shifted, group, "sum") / size
    if kind == "dr-grpo":
        return centered
    others = (size - 1).clamp(min=1)
    if kind == "rloo":
        return centered * size / others
    return centered / ((_per_group(centered.square(), group, "sum") / others).sqrt() + STD_EPS)


def _optimal(values: Tensor, members: Tensor, beta: Number) -> Tensor:
    if not beta > 0:
        raise TrimtabError(f"value_beta = {beta:g} must be more than 0")
    group = torch.unique(members, return_inverse=True)[1]
    size = _per_group(torch.ones_like(values), group, "sum")
    shifted = values - _per_group(values, group, "amax")
    return shifted - beta * (_per_group((shifted / beta).exp(), group, "sum") / size).log()


def _per_group(values: Tensor, group: Tensor, reduce: str) -> Tensor:
    """Reduces over each group and returns the result at every member."""
    slots = torch.zeros(values.numel(), dtype=values.dtype, device=values.device)
    return slots.scatter_reduce(0, group, values, reduce, include_self=False)[group]
