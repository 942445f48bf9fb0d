"""Rejection rules. Each decides from the original mask, without gradient, which tokens or sequences to keep.

A rule answers with (batch, time) or (sequences, 1); rules are ANDed. docs/math.md, "Rejection".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Bool, Float
from torch import Tensor

from trimtab.corrections import divergences
from trimtab.corrections.ratios import LEVELS, Number, Ratios
from trimtab.corrections.weights import check_bounds, check_word

REDUCTIONS = ("token", "mean", "max", "sum")


@dataclass(frozen=True, eq=False)
class Evidence:
    """What a rule may look at: proximal/behavior, and for OPSM current/behavior and the advantage."""

    mismatch: Ratios
    policy: Ratios | None = None
    advantage: Float[Tensor, "batch #time"] | None = None


@runtime_checkable
class Mask(Protocol):
    """A rejection rule. `rule` names it in metrics (`reject/<rule>`); `needs_current` if it reads the policy."""

    @property
    def rule(self) -> str: ...

    @property
    def needs_current(self) -> bool: ...

    def keep(self, evidence: Evidence) -> Bool[Tensor, "..."]:
        """True where the rule has nothing against a token (batch, time) or its sequence (sequences, 1)."""
        ...


@dataclass(frozen=True)
class Band:
    """Keep where min <= ratio <= max at a level. Bounds on rho = proximal/behavior, never on its inverse."""

    level: str
    min: Number
    max: Number
    needs_current = False

    def __post_init__(self) -> None:
        check_word(self.level, LEVELS, "Band")
        check_bounds(self.min, self.max, "Band")

    @property
    def rule(self) -> str:
        return f"band_{self.level}"

    def keep(self, evidence: Evidence) -> Bool[Tensor, "..."]:
        ratio = evidence.mismatch.at(self.level)
        return (ratio >= self.min) & (ratio <= self.max)


@dataclass(frozen=True)
class Divergence:
    """Keep where a divergence, per token or reduced over the sequence, is at most `max` (nats)."""

    kind: str
    reduce: str
    max: Number
    needs_current = False

    def __post_init__(self) -> None:
        check_word(self.kind, divergences.DIVERGENCES, "Divergence")
        check_word(self.reduce, REDUCTIONS, "Divergence")
        if not self.max >= 0:
            raise ValueError(f"Divergence: max = {self.max:g} would reject identical policies, use max >= 0")

    @property
    def rule(self) -> str:
        return f"{self.kind}_{self.reduce}"

    def keep(self, evidence: Evidence) -> Bool[Tensor, "..."]:
        sequences = evidence.mismatch.sequences
        values = divergences.per_token(self.kind, evidence.mismatch)
        if self.reduce == "token":
            return values <= self.max
        reduced = {"mean": sequences.mean, "max": sequences.max, "sum": sequences.sum}[self.reduce](values)
        return reduced <= self.max


@dataclass(frozen=True)
class Veto:
    """Drop a whole sequence when any trained token has ratio < min, on the raw token ratio."""

    min: Number = 1e-4
    rule = "veto"
    needs_current = False

    def __post_init__(self) -> None:
        if not 0 < self.min < 1:
            raise ValueError(f"Veto: min = {self.min:g} must lie between 0 and 1, it is a bound on the ratio")

    def keep(self, evidence: Evidence) -> Bool[Tensor, "sequences 1"]:
        return evidence.mismatch.sequences.max(-evidence.mismatch.log) <= -math.log(self.min)


@dataclass(frozen=True)
class OPSM:
    """Off-policy sequence masking (DeepSeek-V3.2): drop if A < 0 and mean_t(log mu - log pi) > delta.

    Against mu, not pi_old, so that drift inside the update and mismatch both count. A >= 0 is always kept.
    """

    delta: Number
    rule = "opsm"
    needs_current = True

    def keep(self, evidence: Evidence) -> Bool[Tensor, "..."]:
        if evidence.policy is None or evidence.advantage is None:
            raise ValueError("OPSM needs current and advantage")
        sequences = evidence.policy.sequences
        if sequences.ids is None and evidence.advantage.shape[1] != 1:
            raise ValueError("OPSM judges whole sequences: give one advantage per row, shape (batch, 1)")
        far = -evidence.policy.log_geometric > self.delta
        return ~(sequences.spread(far) & (evidence.advantage < 0))
