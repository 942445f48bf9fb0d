"""Importance weights: a ratio at a level, bounded. Never with gradient.

    truncate    min(rho, max)                  TIS
    clip        min(max(rho, min), max)        Miles' clip mode
    mask        rho * [min <= rho <= max]      MIS, IcePop

Bounds are on the ratio itself, never on its inverse or log, so they must enclose 1. docs/math.md, "Weights".
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from trimtab.corrections.ratios import LEVELS, Number
from trimtab.corrections.statistics import Histogram, Mergeable

BOUNDS = ("truncate", "clip", "mask")

MEAN_FLOOR = 1e-8
"""Below this mean weight the batch carries nothing to normalise."""


def check_word(word: str, known: tuple[str, ...], what: str) -> None:
    """Refuse a word that names nothing."""
    if word not in known:
        raise ValueError(f"{what}: unknown {word!r}, use one of {', '.join(known)}")


def check_bounds(low: Number, high: Number, what: str) -> None:
    """Refuse bounds that cannot be bounds on a ratio."""
    if not 0.0 <= low <= 1.0 <= high:
        raise ValueError(f"{what}: [{low:g}, {high:g}] must enclose 1, since bounds are on the ratio itself")


@dataclass(frozen=True)
class Weight:
    """proximal/behavior at `level`, bounded; `normalize` divides by the mean over the update after bounding.

    level: token, sequence or geometric. bound: truncate, clip or mask. None for `min` or `max` leaves that side open.
    Raises `ValueError` for unknown words and for bounds that do not enclose 1.
    """

    level: str = "token"
    bound: str = "truncate"
    min: Number | None = None
    max: Number | None = 2.0
    normalize: bool = False

    def __post_init__(self) -> None:
        check_word(self.level, LEVELS, "Weight")
        check_word(self.bound, BOUNDS, "Weight")
        check_bounds(self.low, self.high, "Weight")
        if self.bound == "truncate" and self.low > 0:
            raise ValueError("Weight: truncate has no lower bound; use bound='clip' for min and max")

    @property
    def low(self) -> Number:
        return 0.0 if self.min is None else self.min

    @property
    def high(self) -> Number:
        return math.inf if self.max is None else self.max

    @property
    def rule(self) -> str:
        return f"weight_{self.level}"

    def inside(self, ratio: Tensor) -> Bool[Tensor, "..."]:
        """Where the bound changes nothing."""
        below = ratio <= self.high
        return below if self.bound == "truncate" else below & (ratio >= self.low)

    def apply_(self, ratio: Tensor) -> Tensor:
        """Bound a ratio in place; NaN stays NaN."""
        if self.bound == "truncate":
            return ratio.clamp_(max=self.high)
        return ratio.clamp_(self.low, self.high) if self.bound == "clip" else ratio.mul_(self.inside(ratio))

    def normalized(self, weight: Tensor, total: Tensor, count: Tensor) -> Tensor:
        """Weights divided by their mean total / count over the update, if `normalize` asks for it."""
        if not self.normalize:
            return weight
        mean = total / count.clamp(min=1)
        return weight / torch.where(mean > MEAN_FLOOR, mean, 1.0).to(weight.dtype)


@dataclass(frozen=True, eq=False)
class WeightStatistics(Mergeable):
    """Weights before and after their bound, over the original mask: tokens at token level, sequences above it."""

    raw: Int[Tensor, "bins"]
    total: Tensor  # after bounding, before self-normalisation
    count: Tensor
    changed: Tensor
    weight: Weight = field(metadata={"merge": lambda ours, theirs: ours})  # noqa: ARG005

    def summary(self) -> dict[str, Tensor]:
        raw = Histogram(self.raw)
        return {
            **{f"_raw/{name}": value for name, value in raw.summary().items()},
            **{f"/{name}": value for name, value in raw.moved(self.weight.apply_).summary().items()},
            "/mean": self.total / self.count,
            "/changed": self.changed / self.count,
        }
