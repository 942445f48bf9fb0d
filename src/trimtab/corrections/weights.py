"""Importance weights: a bounded ratio at a given level, always without gradient.

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

from trimtab.corrections.protocols import Peers, Setting, definition, symbol
from trimtab.corrections.ratios import LEVELS, Number
from trimtab.corrections.statistics import Histogram, Mergeable

BOUNDS = ("truncate", "clip", "mask")

VERL_LOWEST = 1e-6
"""verl refuses 0 as a lower bound, and IcePop's form always has one."""

_MIS = "examples.infra_features.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp"
_ICEPOP = "miles.backends.training_utils.loss_hub.corrections.icepop_function"

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

    @property
    def rejects(self) -> bool:
        """Whether what is outside the bound counts as rejected, as by a mask."""
        return self.bound == "mask"

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

    def equation(self) -> str:
        """The factor of the loss, with its numbers."""
        name = symbol("ρ", self.level)
        bounded = {
            "truncate": f"min({name}, {self.high:g})",
            "clip": f"clip({name}, {self.low:g}, {self.high:g})",
            "mask": f"{name}·1[{self.low:g} ≤ {name} ≤ {self.high:g}]",
        }[self.bound]
        return f"sg[{bounded}]" + ("/w̄" if self.normalize else "")

    def definition(self) -> str:
        """What the symbols of `equation` are."""
        of = "tokens" if self.level == "token" else "sequences"
        mean = f", w̄ = mean of the bounded weight over the update's {of}" if self.normalize else ""
        return definition("ρ", self.level, "π_old", "μ") + mean

    def peers(self) -> Peers:
        """The same weight in other frameworks."""
        return {"verl": self._verl(), "TRL": self._trl(), "Miles": self._miles()}

    def _verl(self) -> Setting:
        threshold, remarks = f"{self.high:g}", ()
        if self.bound == "mask":
            threshold = f'"{max(self.low, VERL_LOWEST):g}_{self.high:g}"'
        elif self.bound == "clip":
            lacks = "# verl only bounds the weight from above; the lower bound"
            remarks = (f"{lacks} {self.low:g} has no equivalent",)
        normalize = {"rollout_is_batch_normalize": "true"} if self.normalize else {}
        return Setting({"rollout_is": self.level, "rollout_is_threshold": threshold, **normalize}, remarks)

    def _trl(self) -> Setting:
        form, key = "mask" if self.bound == "mask" else "truncate", "vllm_importance_sampling"
        options = {f"{key}_mode": f'"{self.level}_{form}"', f"{key}_clip_max": repr(self.high)}
        options |= {f"{key}_clip_min": repr(self.low)} if self.low > 0 else {}
        return Setting(options, ("# TRL does not normalise the weights",) if self.normalize else ())

    def _miles(self) -> Setting:
        """Flags where it is built in, and keys for the mismatch helper of its examples, which has every form."""
        built_in = {}
        if self.level == "token" and not self.normalize:
            custom = {"--custom-tis-function-path": _ICEPOP} if self.bound == "mask" else {}
            bounds = {"--tis-clip": f"{self.high:g}", "--tis-clip-low": f"{self.low:g}"}
            built_in = {"--use-tis": "", **custom, **bounds}
        helper = {
            "use_tis": "true",
            "tis_level": self.level,
            "tis_mode": self.bound,
            "tis_lower_bound": f"{float(self.low)!r}",
            "tis_upper_bound": f"{float(self.high)!r}",
            "tis_batch_normalize": str(self.normalize).lower(),
        }
        return Setting({**built_in, **helper})


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
