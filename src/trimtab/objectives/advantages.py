"""Advantages, without gradient: one value per response from rewards, or one per token."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from trimtab.corrections.ratios import Number, log_ratio
from trimtab.corrections.reduce import widen
from trimtab.errors import TrimtabError, did_you_mean
from trimtab.types import MAX_REWARD

ADVANTAGE_KINDS = {
    "grpo": "(reward - mean) / (std + 1e-6) over the group of a prompt",
    "dr-grpo": "reward - mean over the group of a prompt",
    "rloo": "reward - mean of the others in the group of a prompt",
    "optimal": "reward - V, V = b log mean exp(reward / b) over the group of a prompt",
    "batch-mean": "reward - mean over the batch",
}
"""The definition of each kind, in words."""

FAILED = "drop failed samples before computing advantages"
STD_EPS = 1e-6
WEIGHT_EPS = 1e-8


def advantages(
    kind: str,
    rewards: Tensor | NDArray[Any] | Sequence[Number],
    groups: Tensor | NDArray[Any] | Sequence[Hashable],
    *,
    value_beta: Number | None = None,
) -> Float[Tensor, "batch 1"]:
    """Returns advantages (batch, 1) of `rewards` (batch,), relative to the rewards of the same group id (batch,).

    A group id is a number or any hashable value, such as the text ids of verl.

        grpo     (r - mean) / (std + 1e-6), std with n - 1               arXiv 2402.03300
        dr-grpo  r - mean                                                arXiv 2503.20783
        rloo     r - mean of the others                                  arXiv 2402.14740
        batch-mean  r - mean over the batch, whatever the groups         FlashREINFORCE
        optimal  r - V, V = beta ln mean exp(r / beta), beta = value_beta (1.0)   OAPL, arXiv 2602.19362 eq. 2

    Advantages are exactly 0 in a group of equal rewards or of one response; with batch-mean, in a batch of equal
    rewards. Computed in float64; returned in float64 for float64 rewards, otherwise in float32. Raises `TrimtabError`
    for an unknown kind, a reward not finite or above 1e18, a missing id, and `value_beta` if the kind is not optimal.
    """
    if not isinstance(kind, str) or kind not in ADVANTAGE_KINDS:
        raise TrimtabError(f"unknown advantage {kind!r}{did_you_mean(str(kind), ADVANTAGE_KINDS)}")
    if value_beta is not None and kind != "optimal":
        raise TrimtabError(f"value_beta has no effect with advantage {kind!r}, only with 'optimal': leave it out")
    if len(_shape(rewards)) != 1 or _shape(groups) != _shape(rewards):
        raise TrimtabError(f"rewards {_shape(rewards)} and groups {_shape(groups)} must both be (batch,)")
    rewards = _numbers(rewards)
    for name, tensor in (("rewards", rewards), ("groups", groups)):
        if isinstance(tensor, Tensor) and (tensor.is_complex() or tensor.is_meta):
            raise TrimtabError(f"{name} are {tensor.dtype} on {tensor.device}: give numbers")
    values = rewards.detach().to(torch.float64)
    members = _group_numbers(groups).to(values.device)
    _check(values)
    group = torch.unique(torch.zeros_like(members) if kind == "batch-mean" else members, return_inverse=True)[1]
    if kind == "optimal":
        result = _optimal(values, group, 1.0 if value_beta is None else value_beta)
    else:
        result = _centered(kind, values, group)
    # Not in the dtype of the rewards: 6e4 - (-6e4) overflows float16.
    return result.to(torch.float64 if rewards.dtype == torch.float64 else torch.float32).unsqueeze(1)


def optimal_token_advantages(
    rewards: Float[Tensor, "batch"],
    groups: Int[Tensor, "batch"],
    logp: Float[Tensor, "batch time"],
    squares: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"],
) -> Float[Tensor, "batch time"]:
    """Returns advantages per token: the reward minus the baseline of least variance at that position of the group.

        B_t = sum_i R_i W_it / sum_i W_it,   W_it = sum_(s<=t) (1 - 2 p(y_s) + sum_v p(v)^2)

    logp: log p(y) of the sampled tokens. squares: sum_v p(v)^2. Positions count trained tokens. W is the squared norm
    of the gradient of log p with respect to the logits so far. If only one response of a group reaches a position, the
    baseline there is 0: with the return itself as the baseline, nothing would be trained there. Optimal token baseline,
    arXiv 2602.07078; verl's `optimal_token_baseline` with `handle_zero_tail`.
    """
    _check(rewards)
    values = rewards.detach().double()[:, None]
    energy = torch.where(mask, 1 - 2 * logp.double().exp() + squares.double(), 0.0)
    # Trained tokens are packed to the left, so that a column is a position.
    place = (mask.cumsum(1) - 1).clamp(min=0)
    packed, present = torch.zeros_like(energy), torch.zeros_like(energy)
    packed.scatter_add_(1, place, energy.clamp(min=0))
    present.scatter_add_(1, place, mask.double())
    weight = packed.cumsum(1) * present
    group = torch.unique(groups, return_inverse=True)[1]
    sums = torch.zeros(3, len(group), energy.shape[1], dtype=torch.float64, device=energy.device)
    sums.index_add_(1, group, torch.stack([values * weight, weight, present]))
    products, weights, members = sums[:, group]
    baseline = torch.where(members > 1, products / (weights + WEIGHT_EPS), 0.0)
    return torch.where(mask, values - baseline.gather(1, place), 0.0).to(widen(logp).dtype)


def distillation_advantages(
    teacher: Float[Tensor, "batch time"], student: Float[Tensor, "batch time"], mask: Bool[Tensor, "batch time"]
) -> Float[Tensor, "batch time"]:
    """Returns log p_teacher - log p_student of sampled tokens, 0 at untrained tokens: on-policy distillation.

    The policy gradient with these advantages is the gradient of -KL(student || teacher) at each position. A token
    that the teacher excludes gives -inf. Thinking Machines 2025, "On-policy distillation"; MiMo-V2-Flash, arXiv
    2601.02780.
    """
    return log_ratio(teacher, student, mask).detach()


def _shape(values: Tensor | NDArray[Any] | Sequence[Any]) -> tuple[int, ...]:
    return (len(values),) if isinstance(values, Sequence) else tuple(np.shape(values))


def _numbers(rewards: Tensor | NDArray[Any] | Sequence[Number]) -> Tensor:
    if isinstance(rewards, Tensor):
        return rewards
    for index, reward in enumerate(rewards):
        if not isinstance(reward, Real | np.bool_ | Tensor):
            raise TrimtabError(f"reward {index} is {reward!r}, not a number: {FAILED}")
    # An array of Python objects, such as verl's non-tensor batch, has no dtype that torch knows.
    return torch.as_tensor(rewards.tolist() if isinstance(rewards, np.ndarray) and rewards.dtype.hasobject else rewards)


def _group_numbers(groups: Tensor | NDArray[Any] | Sequence[Hashable]) -> Tensor:
    """Returns integers that are equal exactly where the group ids are equal."""
    if isinstance(groups, Tensor) and not groups.isnan().any():
        return groups
    ids = [group.item() if isinstance(group, Tensor) else group for group in groups]
    for index, group in enumerate(ids):
        if not isinstance(group, Hashable) or group is None or group != group:
            raise TrimtabError(f"group id {index} is {group!r}: name the group of each response by a number or text")
    numbers = {group: number for number, group in enumerate(ids)}
    return torch.tensor([numbers[group] for group in ids], dtype=torch.int64)


def _check(rewards: Tensor) -> None:
    """Raises `TrimtabError` for a reward that is not finite or larger than `MAX_REWARD`."""
    failed = (~(rewards.abs() <= MAX_REWARD)).nonzero()
    if len(failed):
        index = int(failed[0])
        reward = float(rewards[index])
        raise TrimtabError(f"reward {index} is {reward:g}, rewards must be finite and at most {MAX_REWARD:g}: {FAILED}")


def _centered(kind: str, values: Tensor, group: Tensor) -> Tensor:
    size = _per_group(torch.ones_like(values), group, "sum")
    # Subtracting the group's smallest reward first makes equal rewards exactly 0, without rounding.
    shifted = values - _per_group(values, group, "amin")
    centered = shifted - _per_group(shifted, group, "sum") / size
    if kind in ("dr-grpo", "batch-mean"):
        return centered
    others = (size - 1).clamp(min=1)
    if kind == "rloo":
        return centered * size / others
    return centered / ((_per_group(centered.square(), group, "sum") / others).sqrt() + STD_EPS)


def _optimal(values: Tensor, group: Tensor, beta: Number) -> Tensor:
    if not isinstance(beta, Real) or not 0 < beta <= sys.float_info.max:
        raise TrimtabError("value_beta must be a finite number above 0")
    size = _per_group(torch.ones_like(values), group, "sum")
    shifted = values - _per_group(values, group, "amax")
    return shifted - beta * (_per_group((shifted / beta).exp(), group, "sum") / size).log()


def _per_group(values: Tensor, group: Tensor, reduce: str) -> Tensor:
    """Reduces over each group and returns the result at every member."""
    slots = torch.zeros(values.numel(), dtype=values.dtype, device=values.device)
    return slots.scatter_reduce(0, group, values, reduce, include_self=False)[group]
