"""Rejection masks: rules that select, without gradient, the trained tokens or sequences to keep.

A rule returns one value for each token, computed on the original mask; rules are ANDed. Formulas:
docs/reference-objectives.md, "Rejection". A new rule is a frozen dataclass that inherits from `Mask`, here or in your
file: docs/objectives.md.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from trimtab.corrections import divergences
from trimtab.corrections.code_lines import Lines
from trimtab.corrections.fields import CheckedFields, check_bounds, one_of, within
from trimtab.corrections.ratios import (
    LEVELS,
    OVER,
    PER_TOKEN_LEVELS,
    TURN_LEVELS,
    Number,
    Ratios,
    definition,
    symbol,
    units_of,
)
from trimtab.corrections.reduce import Sequences

REDUCTIONS = ("token", "mean", "max", "sum")
READABLE = ("current", "proximal", "behavior", "advantage", "turn")


@dataclass(frozen=True, eq=False)
class RuleInputs:
    """The inputs of a rule, without gradient; log-ratios and log-probs are 0 at untrained positions.

    behavior: log mu, as reported by the sampler. ratios: those to the sampler by their numerator, proximal or current;
    only what some rule lists in its `reads`. Reading another ratio raises `ValueError`.
    """

    sequences: Sequences
    behavior: Float[Tensor, "batch time"]
    ratios: Mapping[str, Ratios]
    given_advantage: Float[Tensor, "batch #time"] | None

    def over(self, numerator: str) -> Ratios:
        """Returns the ratio of a policy to the sampler: `mismatch` for "proximal", `policy` for "current"."""
        if numerator not in self.ratios:
            name = "mismatch" if numerator == "proximal" else "policy"
            raise ValueError(f"a rule that looks at inputs.{name} must have {numerator!r} among its `reads`")
        return self.ratios[numerator]

    @property
    def mismatch(self) -> Ratios:
        """proximal/behavior."""
        return self.over("proximal")

    @property
    def policy(self) -> Ratios:
        """current/behavior."""
        return self.over("current")

    @property
    def advantage(self) -> Float[Tensor, "batch #time"]:
        """(batch, 1) or (batch, time); untrained positions may hold any value."""
        if self.given_advantage is None:
            raise ValueError("a rule that looks at inputs.advantage must have 'advantage' among its `reads`")
        return self.given_advantage


class Mask(CheckedFields, ABC):
    """The base class of rejection rules. A subclass is a frozen dataclass of its bounds.

    per_response: whether all tokens of a response must have the same advantage.
    """

    per_response: ClassVar[bool] = False

    @property
    def rule(self) -> str:
        """The name in the metric key `reject/<rule>`; by default the name of the class, such as `prefix_budget`."""
        return re.sub("(?<=[a-z])(?=[A-Z])", "_", type(self).__name__).lower()

    @property
    @abstractmethod
    def reads(self) -> frozenset[str]:
        """The subset of `READABLE` that the rule reads, with `turn` if it reads `inputs.sequences.turns`.

        A rule without `proximal` needs no proximal forward; a rule with `current` is evaluated in every forward.
        """

    @abstractmethod
    def keep(self, inputs: RuleInputs) -> Bool[Tensor, "batch #time"]:
        """Returns True at the tokens that are kept, in a shape that broadcasts to (batch, time).

        A rule for whole sequences returns `inputs.sequences.spread(value)` of its (sequences, 1) values.
        """

    @abstractmethod
    def equation(self) -> str:
        """Returns the condition that follows `keep where` in the equation, with its numbers."""

    def code(self, lines: Lines) -> str:
        """Returns the condition of `equation` as PyTorch code; optional, for `Objective.code`."""
        raise NotImplementedError


@dataclass(frozen=True)
class Band(Mask):
    """Keeps tokens with min <= ratio <= max at a level. The bounds are on the ratio itself, never on its inverse.

    over: the policy whose ratio to the sampler is judged, "proximal" or "current". A rule over the current policy needs
        no proximal forward, and is evaluated in every forward.
    """

    level: str = one_of(LEVELS)
    min: Number = within("[0, inf]")
    max: Number = within("[0, inf]")
    over: str = one_of(OVER, "proximal")

    def __post_init__(self) -> None:
        self.check_fields()
        check_bounds(self.min, self.max, "Band")

    @property
    def rule(self) -> str:
        return f"band_{self.level}"

    @property
    def reads(self) -> frozenset[str]:
        return frozenset({self.over, "behavior", *(["turn"] if self.level in TURN_LEVELS else [])})

    def keep(self, inputs: RuleInputs) -> Bool[Tensor, "batch #time"]:
        ratio = inputs.over(self.over).at(self.level)
        inside = (ratio >= self.min) & (ratio <= self.max)
        return inside if self.level in PER_TOKEN_LEVELS else units_of(inputs.sequences, self.level).spread(inside)

    def equation(self) -> str:
        letter, policy = OVER[self.over]
        bounds = f"{self.min:g} ≤ {symbol(letter, self.level)} ≤ {self.max:g}"
        return f"{bounds}, {definition(letter, self.level, policy, 'μ')}"

    def code(self, lines: Lines) -> str:
        ratio = lines.ratio_of(self.over, self.level)
        return f"({ratio} >= {self.min}) & ({ratio} <= {self.max})"


@dataclass(frozen=True)
class Divergence(Mask):
    """Keeps tokens whose divergence, per token or reduced over the sequence, is at most `max`.

    kind: k1, k2, k3 or tv, which read the ratio; binary_tv or binary_kl, which read the probabilities.
    reduce: token, or the mean, max or sum over the sequence. over: as in `Band`.
    outward: reject only tokens whose update moves the policy `over` away from the sampler. This is the rule of DPPO
        (arXiv 2602.04879) with reduce = "token", and the rule of VACO (arXiv 2603.01365) with tv and "mean".
    """

    kind: str = one_of(divergences.DIVERGENCES)
    reduce: str = one_of(REDUCTIONS)
    max: Number = within("[0, inf)")
    over: str = one_of(OVER, "proximal")
    outward: bool = False

    @property
    def rule(self) -> str:
        return f"{self.kind}_{self.reduce}"

    @property
    def reads(self) -> frozenset[str]:
        return frozenset({self.over, "behavior", *(["advantage"] if self.outward else [])})

    def keep(self, inputs: RuleInputs) -> Bool[Tensor, "batch #time"]:
        sequences, ratios = inputs.sequences, inputs.over(self.over)
        values = divergences.per_token(self.kind, ratios, inputs.behavior)
        if self.reduce == "token":
            near = values <= self.max
        else:
            reduced = {"mean": sequences.mean, "max": sequences.max, "sum": sequences.sum}[self.reduce](values)
            near = sequences.spread(reduced <= self.max)
        return near | ~moves_away(ratios.log, inputs.advantage) if self.outward else near

    def equation(self) -> str:
        over = "" if self.reduce == "token" else f"{self.reduce}_t "
        policy = OVER[self.over][1]
        value = {"binary_tv": f"|{policy} − μ|", "binary_kl": f"KL(Bern(μ)‖Bern({policy}))"}.get(
            self.kind, f"{self.kind}({policy}/μ)"
        )
        condition = f"{over}{value} ≤ {self.max:g}"
        return f"{condition} or A·({policy} − μ) ≤ 0" if self.outward else condition

    def code(self, lines: Lines) -> str:
        log = lines.log_of(self.over)
        mean, total = ".sum(1, keepdim=True) / length", ".sum(1, keepdim=True)"
        reduced = {"token": "", "mean": mean, "max": ".amax(1, keepdim=True)", "sum": total}[self.reduce]
        near = f"({divergences.code(self.kind, self.over, log, lines)}{reduced} <= {self.max})"
        return f"({near} | (advantage * {log} <= 0))" if self.outward else near


def moves_away(log_ratio: Float[Tensor, "batch time"], advantage: Float[Tensor, "batch #time"]) -> Tensor:
    """Returns True if a step along the advantage moves the ratio to the sampler away from 1; never at A = 0."""
    return log_ratio.sign() * advantage > 0


@dataclass(frozen=True)
class Veto(Mask):
    """Rejects a whole sequence if any of its trained tokens is below `min`, on unbounded values.

    of: "ratio", the ratio to the sampler (Miles' code), or "probability", the probability under the numerator policy
        (the published rule, docs/methods.md). They differ if the sampler's own probability is tiny.
    over: as in `Band`.
    """

    min: Number = within("(0, 1)", 1e-4)
    of: str = one_of(("ratio", "probability"), "ratio")
    over: str = one_of(OVER, "proximal")

    @property
    def reads(self) -> frozenset[str]:
        return frozenset({self.over, "behavior"})

    def keep(self, inputs: RuleInputs) -> Bool[Tensor, "batch #time"]:
        log = inputs.over(self.over).log
        if self.of == "probability":
            log = log + inputs.behavior
        return inputs.sequences.spread(inputs.sequences.max(-log) <= -math.log(self.min))

    def equation(self) -> str:
        letter, policy = OVER[self.over]
        if self.of == "probability":
            return f"every {policy}(y_t) ≥ {self.min:g}"
        return f"every {letter}_t ≥ {self.min:g}, {definition(letter, 'token', policy, 'μ')}"

    def code(self, lines: Lines) -> str:
        log = self.over if self.of == "probability" else lines.log_of(self.over)
        least = lines.define("least", f"{log}.amin(1, keepdim=True)  # at least log {self.min:g}")
        return f"({least} >= {math.log(self.min)})"


_REJECTED = {"negative": (torch.lt, "<"), "positive": (torch.gt, ">"), "both": (torch.ne, "≠")}


@dataclass(frozen=True)
class OPSM(Mask):
    """Off-policy sequence masking (DeepSeek-V3.2): rejects responses with A < 0 and mean_t(log mu - log pi) > delta.

    It compares pi with mu, not with pi_old, so that drift inside the update and mismatch both count.

    sign: the sign of advantages to reject: "negative" (the published rule), or as controls "positive" and "both".
    """

    per_response = True
    delta: Number = within("[0, inf)")
    sign: str = one_of(tuple(_REJECTED), "negative")

    @property
    def reads(self) -> frozenset[str]:
        return frozenset({"current", "behavior", "advantage"})

    def keep(self, inputs: RuleInputs) -> Bool[Tensor, "batch #time"]:
        sequences = inputs.sequences
        if sequences.ids is None and inputs.advantage.shape[1] != 1:
            raise ValueError("OPSM judges whole sequences: give one advantage per row, shape (batch, 1)")
        far = -inputs.policy.log_geometric > self.delta
        rejected, _ = _REJECTED[self.sign]
        return ~(sequences.spread(far) & rejected(inputs.advantage, 0))

    def equation(self) -> str:
        return f"not (A {_REJECTED[self.sign][1]} 0 and mean_t(log μ − log π) > {self.delta:g})"

    def code(self, lines: Lines) -> str:
        lag = lines.define("lag", f"-{lines.at_level(lines.log_of('current'), 'geometric')}  # mean of log mu - log pi")
        return f"~((advantage {_REJECTED[self.sign][1].replace('≠', '!=')} 0) & ({lag} > {self.delta}))"


@dataclass(frozen=True)
class PrefixBudget(Mask):
    """Rejects tokens that move further from the sampler once the response has spent its budget of divergence.

    The divergence D_t = |pi - mu| of the sampled token has a weight that falls linearly from 1 at the first trained
    token to `weight_min` at the last, since early tokens change more of what follows. A token is kept if its update
    does not move away from the sampler, or if

        weight_t D_t <= min(max, max + b sum_(s<t) weight_s - sum_(s<t) weight_s D_s)

    with b the `quantile` of D over the response, clamped to [budget, 2 budget]. The sums run over all trained tokens,
    kept or not. Cumulative prefix divergence, CPPO, arXiv 2606.10968.
    """

    max: Number = within("(0, inf)", 0.15)
    budget: Number = within("(0, inf)", 0.02)
    quantile: Number = within("[0, 1]", 0.9)
    weight_min: Number = within("[0, 1]", 0.8)

    @property
    def reads(self) -> frozenset[str]:
        return frozenset({"current", "behavior", "advantage"})

    def keep(self, inputs: RuleInputs) -> Bool[Tensor, "batch time"]:
        sequences, log = inputs.sequences, inputs.policy.log
        divergence = divergences.probability_gap(inputs.behavior, log).abs()
        place, last = sequences.positions.to(log.dtype) - 1, sequences.spread(sequences.lengths) - 1
        weight = torch.where(sequences.mask, 1 - (1 - self.weight_min) * (place / last.clamp(min=1)), 0.0)
        spent = weight * divergence
        rate = self._quantile(divergence, sequences).clamp(self.budget, 2 * self.budget)
        earned_before = sequences.prefix_sum(weight) - weight
        spent_before = sequences.prefix_sum(spent) - spent
        allowed = self.max + sequences.spread(rate) * earned_before - spent_before
        return ~moves_away(log, inputs.advantage) | (spent <= allowed.clamp(max=self.max))

    def _quantile(self, values: Float[Tensor, "batch time"], sequences: Sequences) -> Float[Tensor, "sequences 1"]:
        """Returns the interpolated quantile over the trained tokens of each sequence; 0 if there are none."""
        lengths = sequences.lengths[:, 0].to(values.dtype)
        ordered, first = _sorted_values(values, sequences)
        # The fractional index of the quantile in the sorted values of its sequence.
        place = self.quantile * (lengths - 1).clamp(min=0)
        low = place.floor()
        last = first + (lengths - 1).clamp(min=0).long()
        # A sequence without a trained token may begin past the end: its value is replaced by 0 below.
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

    def code(self, lines: Lines) -> str:
        log = lines.log_of("current")
        gap = divergences.code("binary_tv", "current", log, lines)
        return lines.write(f"""
            fall = {1 - self.weight_min} * (position - 1).to(current.dtype) / (length - 1).clamp(min=1)
            u = torch.where(mask, 1 - fall, 0.0)  # early tokens count for more
            ordered = torch.where(mask, {gap}, inf).sort(1).values
            place = {self.quantile} * (length - 1).to(current.dtype)  # of the quantile
            below = ordered.gather(1, place.floor().long())
            above = ordered.gather(1, place.ceil().long())
            rate = torch.lerp(below, above, place.frac()).clamp({self.budget}, {2 * self.budget})
            spent = u * {gap}
            left = {self.max} + rate * (u.cumsum(1) - u) - (spent.cumsum(1) - spent)
            ((spent <= left.clamp(max={self.max})) | (advantage * {log} <= 0))
            """)


def _sorted_values(
    values: Float[Tensor, "batch time"], sequences: Sequences
) -> tuple[Float[Tensor, "positions"], Int[Tensor, "sequences"]]:
    """Returns the values sorted within each sequence, and the index of the smallest value of each sequence.

    Untrained tokens come after all trained tokens of their row, or, with `sequences.ids`, of the batch.
    """
    if sequences.ids is None:  # each row is a sequence: one sort along the rows takes a third of the time
        rows, time = values.shape
        ordered = torch.where(sequences.mask, values, torch.inf).sort(dim=1).values
        return ordered.reshape(-1), torch.arange(rows, device=values.device) * time
    count = sequences.lengths.numel()
    slots = torch.where(sequences.mask.reshape(-1), sequences.slots, count)  # untrained: after all sequences
    # Sorted by value, and then by sequence with a stable sort, which keeps the order by value inside each.
    order = values.reshape(-1).argsort()
    by_sequence = slots[order].sort(stable=True)
    first = torch.searchsorted(by_sequence.values, torch.arange(count, device=values.device))
    return values.reshape(-1)[order[by_sequence.indices]], first
