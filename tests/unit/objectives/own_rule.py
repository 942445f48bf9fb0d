"""A rule and an objective as a user writes them, in one file outside the package: DPPO with the binary total variation.

arXiv 2602.04879: a token is left out where the update moves its probability further from the sampler's than `tv_max`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.objectives import (
    KL,
    Aggregation,
    Band,
    Clipped,
    Divergence,
    Mask,
    Objective,
    Ratio,
    RuleInputs,
    Unclipped,
    Weight,
)

ROUNDS = 3
"""No function."""


@dataclass(frozen=True)
class TotalVariation(Mask):
    """Drop where A (pi - mu) > 0 and |pi - mu| > max, for the probabilities of the sampled token."""

    max: float

    @property
    def rule(self) -> str:
        return "tv"

    @property
    def reads(self) -> frozenset[str]:
        return frozenset({"current", "behavior", "advantage"})

    def keep(self, inputs: RuleInputs) -> Tensor:
        log = inputs.policy.log
        # pi - mu = max(pi, mu) (1 - e^-|log w|), without cancellation.
        gap = log.sign() * (inputs.behavior + log.clamp(min=0)).exp() * -torch.expm1(-log.abs())
        return ~((gap * inputs.advantage > 0) & (gap.abs() > self.max))

    def equation(self) -> str:
        return f"not (A (π − μ) > 0 and |π(y_t) − μ(y_t)| > {self.max:g})"


def dppo(*, tv_max: float = 0.15) -> Objective:
    return Objective("dppo", Ratio("token", "behavior"), Unclipped(), masks=(TotalVariation(tv_max),))


def turn_level(*, keep_max: float = 1.5) -> Objective:
    """Clips, weights and masks model turns."""
    masks = (Band("turn_geometric", 0.5, keep_max),)
    weight = Weight("turn", "mask", 0.25, 4.0)
    return Objective("turn-level", Ratio("turn_geometric"), Clipped(), weight, masks)


def needy(*, bound: float, sides: int = 2, label: str | None = None) -> Objective:
    """A keyword without default, a whole number, and one that may be left out."""
    return Objective(label or f"needy-{sides}", Ratio("token", "behavior"), Unclipped(), masks=(TotalVariation(bound),))


def clipped() -> Objective:
    """What other frameworks have, but for one rule."""
    masks = (TotalVariation(0.15), Band("token", 0.5, 2.0), Divergence("k3", "max", 0.1))
    return Objective("clipped", Ratio("token", "behavior"), Clipped(), masks=masks)


def with_kl(*, clip_low: float = 0.2) -> Objective:
    """Shared parts of its own, which stay where a recipe does not name them."""
    rows = Aggregation("seq-mean-token-sum")
    return Objective("with-kl", Ratio(), Clipped(clip_low), aggregation=rows, kl=KL("k3", 0.5), entropy_coef=0.25)


def refused() -> Objective:
    raise ValueError("bad bound")


def broken() -> Objective:
    raise KeyError("no such thing")


def nothing() -> None:
    """No objective at all."""


def loose(**keywords: float) -> Objective:
    return dppo(**keywords)
