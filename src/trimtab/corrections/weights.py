"""Importance weights: the ratio proximal/behavior, or current/behavior, at a level, bounded, always without gradient.

    truncate    min(rho, max)                  TIS
    clip        min(max(rho, min), max)        Miles' clip mode
    mask        rho * [min <= rho <= max]      MIS, IcePop

Bounds are on the ratio itself, never on its inverse or log, so they must enclose 1 (docs/reference-objectives.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from trimtab.corrections.code_lines import Lines
from trimtab.corrections.fields import CheckedFields, check_bounds, one_of
from trimtab.corrections.ratios import LEVELS, OVER, PER_TOKEN_LEVELS, TURN_LEVELS, Number, definition, symbol
from trimtab.corrections.statistics import Histogram, Mergeable
from trimtab.errors import TrimtabError

BOUNDS = ("truncate", "clip", "mask")

MEAN_FLOOR = 1e-8
"""Smallest mean weight that normalization divides by; below it the weights stay unchanged."""


@dataclass(frozen=True)
class Weight(CheckedFields):
    """An importance weight: the ratio of a policy to the sampler at a level, bounded, without gradient.

    over: the numerator policy, "proximal" or "current". A weight over "current" is evaluated in every forward.
    Raises `TrimtabError` for unknown options and for bounds that do not enclose 1.
    """

    level: str = one_of(LEVELS, "token")
    bound: str = one_of(BOUNDS, "truncate")  # truncate, clip or mask
    min: Number | None = None  # None: no lower bound
    max: Number | None = 2.0  # None: no upper bound
    normalize: bool = False  # after bounding, divide by the mean over the update
    over: str = one_of(OVER, "proximal")

    def __post_init__(self) -> None:
        self.check_fields()
        check_bounds(self.low, self.high, "Weight")
        if self.bound == "truncate" and self.low > 0:
            raise TrimtabError("Weight: truncate has no lower bound; use bound='clip' for min and max")

    @property
    def low(self) -> Number:
        return 0.0 if self.min is None else self.min

    @property
    def high(self) -> Number:
        return math.inf if self.max is None else self.max

    @property
    def rule(self) -> str:
        return f"weight_{self.level}"

    @property
    def reads(self) -> frozenset[str]:
        """Fields of `PolicyLogps` that the weight reads."""
        return frozenset({self.over, "behavior", *(["turn"] if self.level in TURN_LEVELS else [])})

    @property
    def rejects(self) -> bool:
        """Whether tokens outside the bound count as rejected, as by a mask."""
        return self.bound == "mask"

    def inside(self, ratio: Tensor) -> Bool[Tensor, "..."]:
        """Returns True where the bound does not change the ratio."""
        below = ratio <= self.high
        return below if self.bound == "truncate" else below & (ratio >= self.low)

    def apply(self, ratio: Tensor) -> Tensor:
        """Returns the bounded ratio; NaN stays NaN."""
        if self.bound == "truncate":
            return ratio.clamp(max=self.high)
        return ratio.clamp(self.low, self.high) if self.bound == "clip" else ratio * self.inside(ratio)

    def normalized(self, weight: Tensor, total: Tensor, count: Tensor) -> Tensor:
        """Returns the weights; if `normalize` is set, divided by their mean over the update, total / count."""
        if not self.normalize:
            return weight
        mean = total / count.clamp(min=1)
        return weight / torch.where(mean > MEAN_FLOOR, mean, 1.0).to(weight.dtype)

    def equation(self) -> str:
        """Returns the factor of the loss as text, with its numbers."""
        name = symbol(OVER[self.over][0], self.level)
        bounded = {
            "truncate": f"min({name}, {self.high:g})",
            "clip": f"clip({name}, {self.low:g}, {self.high:g})",
            "mask": f"{name}·1[{self.low:g} ≤ {name} ≤ {self.high:g}]",
        }[self.bound]
        return f"sg[{bounded}]" + ("/w̄" if self.normalize else "")

    def code(self, lines: Lines) -> str:
        """Returns the bounded weight, not normalized, as PyTorch code."""
        rho = lines.ratio_of(self.over, self.level)
        inside = f"({rho} >= {self.low}) & ({rho} <= {self.high})" if self.low > 0 else f"{rho} <= {self.high}"
        bounds = f"{self.low}, {self.high}" if self.low > 0 else f"max={self.high}"
        bounded = f"torch.where({inside}, {rho}, 0.0)" if self.bound == "mask" else f"{rho}.clamp({bounds})"
        return f"{bounded}.detach()" if self.over == "current" else bounded

    def add_mean(self, lines: Lines) -> None:
        """Adds to the lines the mean of `weight` over the whole update, by which `normalize` divides."""
        trained = "mask" if self.level in PER_TOKEN_LEVELS else "mask.any(1)"
        mean = f"weight[{trained}].mean()"
        if self.level in TURN_LEVELS:
            mean = "(weight / turn_length)[mask].sum() / (1 / turn_length)[mask].sum()"
        mean = lines.define("mean", mean)
        lines.values["mean_weight"] = f"torch.where({mean} > {MEAN_FLOOR}, {mean}, 1.0)"
        lines.of_update["mean_weight"] = "the mean weight"

    def definition(self) -> str:
        """Returns the definitions of the symbols in `equation`."""
        units = {**dict.fromkeys(PER_TOKEN_LEVELS, "tokens"), **dict.fromkeys(TURN_LEVELS, "turns")}
        units = units.get(self.level, "sequences")
        mean = f", w̄ = mean of the bounded weight over the update's {units}" if self.normalize else ""
        letter, policy = OVER[self.over]
        return definition(letter, self.level, policy, "μ") + mean


@dataclass(frozen=True, eq=False)
class WeightStatistics(Mergeable):
    """Statistics of the weights of trained tokens, sequences or turns, before and after bounding."""

    raw: Int[Tensor, "bins"]
    total: Tensor  # after bounding, before self-normalization
    count: Tensor
    changed: Tensor
    weight: Weight = field(metadata={"merge": lambda left, right: left})  # noqa: ARG005

    def summary(self) -> dict[str, Tensor]:
        raw = Histogram(self.raw)
        return {
            **{f"_raw/{name}": value for name, value in raw.summary().items()},
            **{f"/{name}": value for name, value in raw.transformed(self.weight.apply).summary().items()},
            "/mean": self.total / self.count,
            "/changed": self.changed / self.count,
        }
