"""Rejection by a budget that a response spends from its first token on (CPPO)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from trimtab.corrections.divergences import probability_gap
from trimtab.corrections.masks import Evidence, Mask, moves_away
from trimtab.corrections.ratios import Number
from trimtab.corrections.reduce import Sequences


@dataclass(frozen=True)
class PrefixBudget(Mask):
    """Rejects tokens that move further from the sampler once the response has spent its budget of divergence.

    The divergence D_t = |pi - mu| of the sampled token has a weight that falls linearly from 1 at the first trained
    token to `weight_min` at the last, since early tokens change more of what follows. Kept where the update does not
    lead away from the sampler, or where

        weight_t D_t <= min(max, max + b sum_(s<t) weight_s - sum_(s<t) weight_s D_s)

    with b the `quantile` of D over the response, within [budget, 2 budget]. The sums run over all trained tokens, kept
    or not. Cumulative prefix divergence, CPPO, arXiv 2606.10968.
    """

    max: Number = 0.15
    budget: Number = 0.02
    quantile: Number = 0.9
    weight_min: Number = 0.8

    def __post_init__(self) -> None:
        if not (0 < self.max < math.inf and 0 < self.budget < math.inf):
            raise ValueError(
                f"PrefixBudget: max = {self.max:g} and budget = {self.budget:g} must be finite and above 0"
            )
        if not (0 <= self.quantile <= 1 and 0 <= self.weight_min <= 1):
            raise ValueError(
                f"PrefixBudget: quantile = {self.quantile:g} and weight_min = {self.weight_min:g} must lie in [0, 1]"
            )

    @property
    def rule(self) -> str:
        return "prefix_budget"

    @property
    def reads(self) -> frozenset[str]:
        return frozenset({"current", "behavior", "advantage"})

    def keep(self, evidence: Evidence) -> Bool[Tensor, "batch time"]:
        sequences, log = evidence.sequences, evidence.policy.log
        divergence = probability_gap(evidence.behavior, log).abs()
        place, last = sequences.positions.to(log.dtype) - 1, sequences.spread(sequences.lengths) - 1
        weight = torch.where(sequences.mask, 1 - (1 - self.weight_min) * (place / last.clamp(min=1)), 0.0)
        spent = weight * divergence
        rate = self._quantile(divergence, sequences).clamp(self.budget, 2 * self.budget)
        earned_before = sequences.prefix_sum(weight) - weight
        spent_before = sequences.prefix_sum(spent) - spent
        allowed = self.max + sequences.spread(rate) * earned_before - spent_before
        return ~moves_away(log, evidence.advantage) | (spent <= allowed.clamp(max=self.max))

    def _quantile(self, values: Float[Tensor, "batch time"], sequences: Sequences) -> Float[Tensor, "sequences 1"]:
        """Returns the quantile over the trained tokens of each sequence, linear between two values; 0 without one."""
        lengths = sequences.lengths[:, 0].to(values.dtype)
        ordered, first = _sorted_values(values, sequences)
        # The place of the quantile among the values of its sequence, in general between two of them.
        place = self.quantile * (lengths - 1).clamp(min=0)
        low = place.floor()
        last = first + (lengths - 1).clamp(min=0).long()
        # A sequence without a trained token may begin past the end: any value will do, it is replaced below.
        end = len(ordered) - 1
        below = ordered[(first + low.long()).clamp(max=end)]
        above = ordered[torch.minimum(first + low.long() + 1, last).clamp(max=end)]
        value = below + (above - below) * (place - low)
        return torch.where(lengths > 0, value, 0.0)[:, None]

    def equation(self) -> str:
        return (
            f"u_t |π − μ| ≤ min({self.max:g}, {self.max:g} + b Σ_s<t u_s − Σ_s<t u_s |π − μ|_s) or A·(π − μ) ≤ 0, "
            f"u falls from 1 to {self.weight_min:g}, b = {self.quantile:g}-quantile of |π − μ| within "
            f"[{self.budget:g}, {2 * self.budget:g}]"
        )


def _sorted_values(
    values: Float[Tensor, "batch time"], sequences: Sequences
) -> tuple[Float[Tensor, "positions"], Int[Tensor, "sequences"]]:
    """Returns the values sorted within each sequence, and the place of each sequence's smallest one.

    The values of untrained tokens come after all trained ones of the sequence, or of the batch.
    """
    device = values.device
    if sequences.ids is None:  # a row is a sequence: one sort along the rows
        rows, time = values.shape
        ordered = torch.where(sequences.mask, values, torch.inf).sort(dim=1).values
        return ordered.reshape(-1), torch.arange(rows, device=device) * time
    count = sequences.lengths.numel()
    slots = torch.where(sequences.mask.reshape(-1), sequences.slots, count)  # untrained: after all sequences
    # Sorted by value, and then by sequence with a stable sort, which keeps the order by value inside each.
    order = values.reshape(-1).argsort()
    by_sequence = slots[order].sort(stable=True)
    first = torch.searchsorted(by_sequence.values, torch.arange(count, device=device))
    return values.reshape(-1)[order[by_sequence.indices]], first
