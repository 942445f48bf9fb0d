"""Rejection masks: rules that select, without gradient, the trained tokens or sequences to keep.

A rule returns (batch, time) or (sequences, 1), computed on the original mask; rules are ANDed. Formulas: docs/math.md,
"Rejection". A new rule is a frozen dataclass that inherits from `Mask`, here or in a file of your own:
docs/objectives.md.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from jaxtyping import Bool, Float
from torch import Tensor

from trimtab.corrections import divergences
from trimtab.corrections.protocols import FRAMEWORKS, Peers, Setting, definition, symbol
from trimtab.corrections.ratios import LEVELS, TURN_LEVELS, Number, Ratios, units_of
from trimtab.corrections.reduce import Sequences, select
from trimtab.corrections.weights import VERL_LOWEST, check_bounds, check_word

Part = TypeVar("Part")

REDUCTIONS = ("token", "mean", "max", "sum")
READABLE = ("current", "proximal", "behavior", "advantage", "turn")


class Evidence:
    """The inputs of a rule, without gradient; log-ratios and log-probs are 0 at untrained positions.

    A policy that no rule names in `reads` is not computed. Reading it raises `ValueError`.
    """

    def __init__(
        self,
        sequences: Sequences,
        behavior: Float[Tensor, "batch time"],
        *,
        mismatch: Ratios | None = None,
        policy: Ratios | None = None,
        advantage: Float[Tensor, "batch #time"] | None = None,
    ) -> None:
        self.sequences = sequences
        self._behavior, self._mismatch, self._policy, self._advantage = behavior, mismatch, policy, advantage

    @cached_property
    def behavior(self) -> Float[Tensor, "batch time"]:
        """log mu as reported by the sampler."""
        return select(self._behavior, self.sequences.mask)

    @property
    def mismatch(self) -> Ratios:
        """proximal/behavior."""
        return _require(self._mismatch, "mismatch", "proximal")

    @property
    def policy(self) -> Ratios:
        """current/behavior."""
        return _require(self._policy, "policy", "current")

    @property
    def advantage(self) -> Float[Tensor, "batch #time"]:
        """(batch, 1) or (batch, time); untrained positions may hold any value."""
        return _require(self._advantage, "advantage", "advantage")


def _require(part: Part | None, name: str, read: str) -> Part:
    if part is None:
        raise ValueError(f"a rule that looks at evidence.{name} must have {read!r} among its `reads`")
    return part


class Mask(ABC):
    """The base class of rejection rules. A subclass is a frozen dataclass of its bounds; only `peers` has a default."""

    @property
    @abstractmethod
    def rule(self) -> str:
        """The name in the metric key `reject/<rule>`."""

    @property
    @abstractmethod
    def reads(self) -> frozenset[str]:
        """The subset of `READABLE` that it reads; `turn` where it reads `evidence.sequences.turns`.

        Without `proximal` no proximal forward is needed for it; with `current` it is evaluated in every forward.
        """

    @abstractmethod
    def keep(self, evidence: Evidence) -> Bool[Tensor, "..."]:
        """Returns True at tokens (batch, time), or sequences (sequences, 1), that are kept."""

    @abstractmethod
    def equation(self) -> str:
        """Returns the condition that follows `keep where` in the equation, with its numbers."""

    def peers(self) -> Peers:
        """Returns the settings of the same rule in other frameworks; one without an equivalent has no entry."""
        return {}


@dataclass(frozen=True)
class Band(Mask):
    """Keeps where min <= rho <= max at a level. The bounds are on rho = proximal/behavior, never on its inverse."""

    level: str
    min: Number
    max: Number

    def __post_init__(self) -> None:
        check_word(self.level, LEVELS, "Band")
        check_bounds(self.min, self.max, "Band")

    @property
    def rule(self) -> str:
        return f"band_{self.level}"

    @property
    def reads(self) -> frozenset[str]:
        return frozenset({"proximal", "behavior", *(["turn"] if self.level in TURN_LEVELS else [])})

    def keep(self, evidence: Evidence) -> Bool[Tensor, "..."]:
        ratio = evidence.mismatch.at(self.level)
        inside = (ratio >= self.min) & (ratio <= self.max)
        return units_of(evidence.sequences, self.level).spread(inside) if self.level in TURN_LEVELS else inside

    def equation(self) -> str:
        bounds = f"{self.min:g} ≤ {symbol('ρ', self.level)} ≤ {self.max:g}"
        return f"{bounds}, {definition('ρ', self.level, 'π_old', 'μ')}"

    def peers(self) -> Peers:
        if self.level in TURN_LEVELS:
            return {name: Setting(remarks=(f"# {name} has no mask for each turn",)) for name in FRAMEWORKS}
        option = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}[self.level]
        # verl compares k1 = -log ratio with the logs of the bounds, and so bounds 1/ratio.
        low, high = (f"{max(1 / max(bound, VERL_LOWEST), VERL_LOWEST):.6g}" for bound in (self.max, self.min))
        return {
            "verl": Setting(
                {"rollout_rs": option, "rollout_rs_threshold": f'"{low}_{high}"'},
                (f"# verl bounds 1/ratio: these are the reciprocals of [{self.min:g}, {self.max:g}]",),
            ),
            "TRL": Setting(remarks=(f"# TRL has no {self.level} mask [{self.min:g}, {self.max:g}]",)),
            "Miles": Setting(
                {
                    "use_rs": "true",
                    "rs_level": self.level,
                    "rs_lower_bound": f"{float(self.min)!r}",
                    "rs_upper_bound": f"{float(self.max)!r}",
                }
            ),
        }


@dataclass(frozen=True)
class Divergence(Mask):
    """Keeps where a divergence, per token or reduced over the sequence, is at most `max` (nats)."""

    kind: str
    reduce: str
    max: Number

    def __post_init__(self) -> None:
        check_word(self.kind, divergences.DIVERGENCES, "Divergence")
        check_word(self.reduce, REDUCTIONS, "Divergence")
        if not self.max >= 0:
            raise ValueError(f"Divergence: max = {self.max:g} would reject identical policies, use max >= 0")

    @property
    def rule(self) -> str:
        return f"{self.kind}_{self.reduce}"

    @property
    def reads(self) -> frozenset[str]:
        return frozenset({"proximal", "behavior"})

    def keep(self, evidence: Evidence) -> Bool[Tensor, "..."]:
        sequences = evidence.sequences
        values = divergences.per_token(self.kind, evidence.mismatch)
        if self.reduce == "token":
            return values <= self.max
        reduced = {"mean": sequences.mean, "max": sequences.max, "sum": sequences.sum}[self.reduce](values)
        return reduced <= self.max

    def equation(self) -> str:
        over = "" if self.reduce == "token" else f"{self.reduce}_t "
        return f"{over}{self.kind}(π_old/μ) ≤ {self.max:g}"

    def peers(self) -> Peers:
        of = f"{self.kind} of a token" if self.reduce == "token" else f"{self.reduce} {self.kind} of a response"
        absent = {name: Setting(remarks=(f"# {name} has no mask on the {of} ({self.max:g})",)) for name in FRAMEWORKS}
        if self.kind not in ("k2", "k3"):  # verl's k1 bounds both sides
            return absent
        option = f"token_{self.kind}" if self.reduce == "token" else f"seq_{self.reduce}_{self.kind}"
        return absent | {"verl": Setting({"rollout_rs": option, "rollout_rs_threshold": f"{self.max:g}"})}


@dataclass(frozen=True)
class Veto(Mask):
    """Rejects a whole sequence when any of its trained tokens has a ratio below `min`, on the raw token ratio."""

    min: Number = 1e-4

    def __post_init__(self) -> None:
        if not 0 < self.min < 1:
            raise ValueError(f"Veto: min = {self.min:g} must lie between 0 and 1, it is a bound on the ratio")

    @property
    def rule(self) -> str:
        return "veto"

    @property
    def reads(self) -> frozenset[str]:
        return frozenset({"proximal", "behavior"})

    def keep(self, evidence: Evidence) -> Bool[Tensor, "sequences 1"]:
        return evidence.sequences.max(-evidence.mismatch.log) <= -math.log(self.min)

    def equation(self) -> str:
        return f"every ρ_t ≥ {self.min:g}, ρ_t = π_old(y_t)/μ(y_t)"

    def peers(self) -> Peers:
        remark = "# Miles applies its veto beside a band only (use_rs)"
        return {"Miles": Setting({"rs_veto_threshold": f"{float(self.min)!r}"}, (remark,))}


@dataclass(frozen=True)
class OPSM(Mask):
    """Off-policy sequence masking (DeepSeek-V3.2): rejects where A < 0 and mean_t(log mu - log pi) > delta.

    It compares with mu, not pi_old, so that drift inside the update and mismatch both count. A >= 0 is always kept.
    """

    delta: Number

    @property
    def rule(self) -> str:
        return "opsm"

    @property
    def reads(self) -> frozenset[str]:
        return frozenset({"current", "behavior", "advantage"})

    def keep(self, evidence: Evidence) -> Bool[Tensor, "..."]:
        sequences = evidence.sequences
        if sequences.ids is None and evidence.advantage.shape[1] != 1:
            raise ValueError("OPSM judges whole sequences: give one advantage per row, shape (batch, 1)")
        far = -evidence.policy.log_geometric > self.delta
        return ~(sequences.spread(far) & (evidence.advantage < 0))

    def equation(self) -> str:
        return f"not (A < 0 and mean_t(log μ − log π) > {self.delta:g})"

    def peers(self) -> Peers:
        return {
            "verl": Setting(remarks=("# verl has no OPSM",)),
            "TRL": Setting({"off_policy_mask_threshold": repr(self.delta)}),
            "Miles": Setting(
                {"--use-opsm": "", "--opsm-delta": f"{self.delta:g}"},
                ("# Miles compares with π_old, not with the sampler",),
            ),
        }
