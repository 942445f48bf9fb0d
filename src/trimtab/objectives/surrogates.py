"""Surrogates: per-token terms to maximize, functions of log-ratio and advantage. The interface, and basic surrogates.

A surrogate reads tensors that are 0 at untrained tokens, and a ratio with a bounded exponent. All values are then
finite, and a token that is rejected later leaves no NaN in the gradient. A new surrogate is a frozen dataclass
that inherits from `Surrogate`, in the package or in your file: docs/objectives.md.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from trimtab.corrections.code_lines import Lines
from trimtab.corrections.fields import CheckedFields, within
from trimtab.corrections.ratios import LEVELS, Number, bounded
from trimtab.corrections.reduce import Sequences
from trimtab.corrections.statistics import Mean, Mergeable
from trimtab.errors import TrimtabError
from trimtab.objectives.aggregation import Aggregation
from trimtab.objectives.ratio import Ratio
from trimtab.objectives.state import State


@dataclass(frozen=True, eq=False)
class Terms:
    """The inputs of a surrogate, all (batch, time) and 0 where the mask is False.

    log_ratio: at the objective's level, not bounded, with the gradient of each token's own log-prob.
    token_log_ratio: the same at token level.
    logp: log pi of the current policy, with gradient.
    on_policy: trained tokens that have a behavior policy; False at LUFFY's external tokens.
    behavior, age: log mu, and the age as in `PolicyLogps`; None unless the surrogate lists them in `reads`.
    """

    log_ratio: Float[Tensor, "batch time"]
    token_log_ratio: Float[Tensor, "batch time"]
    logp: Float[Tensor, "batch time"]
    advantage: Float[Tensor, "batch time"]
    mask: Bool[Tensor, "batch time"]
    on_policy: Bool[Tensor, "batch time"]
    sequences: Sequences
    behavior: Float[Tensor, "batch time"] | None = None
    age: Int[Tensor, "batch time"] | None = None

    @property
    def ratio(self) -> Float[Tensor, "batch time"]:
        """The ratio, its exponent bounded, with gradient."""
        return bounded(self.log_ratio).exp()

    def share(self, name: str, where: Tensor) -> dict[str, Mergeable]:
        """Returns a metric: the share of trained tokens at which `where`, bools (batch, time), is True."""
        if where.dtype != torch.bool:
            raise TrimtabError(f"metric {name!r}: the share of tokens needs a mask of bools, not {where.dtype}")
        return {name: Mean.of(where & self.mask, self.mask)}

    def clipped(self, values: Tensor, low: Tensor | Number, high: Tensor | Number) -> dict[str, Mergeable]:
        """Returns the shares of trained tokens that are clipped: below `low` with A < 0, above `high` with A > 0."""
        below, above = (self.advantage < 0) & (values < low), (self.advantage > 0) & (values > high)
        return {**self.share("clip/low", below), **self.share("clip/high", above)}


Value = tuple[Float[Tensor, "batch time"], dict[str, Mergeable]]


class Surrogate(CheckedFields, ABC):
    """The base class of policy terms. A subclass is a frozen dataclass with `__call__` and `equation`.

    reads: fields of `PolicyLogps` read besides `current` and the ratio's denominator.
    per_response: whether all tokens of a response must have the same advantage.
    single_policy: whether each response must come from a single policy.
    learns_without_advantage: whether it has a gradient even if every advantage is 0, as a regression has.
    collects: whether it needs the `magnitudes` of the whole update before the first micro-batch.
    bounds_ratio: whether it equals `Unclipped` apart from its clip or bound.
    ratio_levels, ratio_over: the levels and the denominators of the ratio that it can have; ratio_because: why.
    """

    reads: ClassVar[frozenset[str]] = frozenset()
    per_response: ClassVar[bool] = False
    single_policy: ClassVar[bool] = False
    learns_without_advantage: ClassVar[bool] = False
    collects: ClassVar[bool] = False
    bounds_ratio: ClassVar[bool] = False
    ratio_levels: ClassVar[tuple[str, ...]] = LEVELS
    ratio_over: ClassVar[tuple[str, ...]] = ("proximal", "behavior")
    ratio_because: ClassVar[str] = ""

    @abstractmethod
    def __call__(self, terms: Terms, state: State) -> Value:
        """Returns the term of each token (to be maximized), and statistics such as clipped shares by metric key."""

    def checked(self, terms: Terms, state: State) -> Value:
        """Returns the result of `__call__`. Raises `TrimtabError` unless it is one value per token, and metrics."""
        returned, name, shape = self(terms, state), type(self).__name__, tuple(terms.mask.shape)
        if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping)):
            raise TrimtabError(
                f"{name} returned {type(returned).__name__}, expected two: the value, and metrics or {{}}"
            )
        value = returned[0]
        if not isinstance(value, Tensor) or tuple(value.shape) != shape or not value.is_floating_point():
            what = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise TrimtabError(f"{name} returned {what}, expected a number for each token: floats {shape}")
        if terms.log_ratio.requires_grad and not value.requires_grad and torch.is_grad_enabled():
            raise TrimtabError(f"{name} returned a value without gradient, which trains nothing: do not detach it")
        return returned

    @abstractmethod
    def equation(self, ratio: str) -> str:
        """Returns the term as text with its numbers; `ratio` is the symbol of the ratio."""

    def notes(self) -> tuple[str, ...]:
        """Returns further lines of the equation: definitions of symbols and warnings."""
        return ()

    def code(self, lines: Lines) -> str:
        """Returns the term as PyTorch code; optional, for `Objective.code`."""
        raise NotImplementedError

    def refusal(self, ratio: Ratio, aggregation: Aggregation, *, corrected: bool) -> str | None:
        """Returns why it does not fit these parts, or None. corrected: whether there is a weight or a mask."""
        level = ratio.level if ratio.level in self.ratio_levels else self.ratio_levels[0]
        over = ratio.over if ratio.over in self.ratio_over else self.ratio_over[0]
        if ratio == Ratio(level, over):
            return None
        wanted = f'Ratio("{level}", "{over}"), not Ratio("{ratio.level}", "{ratio.over}")'
        return f"{type(self).__name__} {self.ratio_because}: use {wanted}"

    def magnitudes(self, terms: Terms) -> Float[Tensor, "tokens"]:
        """Returns the |log-ratio| that `State.magnitudes` collects, `NOT_COUNTED` for other tokens. No gradient."""
        raise NotImplementedError

    def unbounded(self) -> Surrogate:
        """Returns the surrogate without its clip or bound."""
        return Unclipped() if self.bounds_ratio else self


@dataclass(frozen=True)
class Clipped(Surrogate):
    """min(r A, clip(r, 1 - low, 1 + high) A), and for A < 0 at least dual * A.

    PPO (arXiv 1707.06347 eq. 7), asymmetric as in DAPO (2503.14476), dual clip of arXiv 1912.09729.
    """

    bounds_ratio = True
    low: Number = within("[0, 1]", 0.2)
    high: Number = within("[0, inf]", 0.2)
    dual: Number | None = within("(1, inf]", None, optional=True)

    def __call__(self, terms: Terms, state: State) -> Value:
        ratio, advantage = terms.ratio, terms.advantage
        low, high = 1.0 - self.low, 1.0 + self.high
        value = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
        statistics = terms.clipped(ratio, low, high)
        if self.dual is not None:
            # For A < 0 only: at A >= 0 the floor dual * A would raise the value of every token.
            value = torch.where(advantage < 0, torch.maximum(value, self.dual * advantage), value)
            statistics |= terms.share("clip/dual", (advantage < 0) & (ratio > self.dual))
        return value, statistics

    def equation(self, ratio: str) -> str:
        clipped = f"min({ratio} A, clip({ratio}, {1 - self.low:g}, {1 + self.high:g}) A)"
        return clipped if self.dual is None else f"max[A<0]({clipped}, {self.dual:g} A)"

    def code(self, lines: Lines) -> str:
        clipped = f"torch.minimum(ratio * advantage, ratio.clamp({1 - self.low}, {1 + self.high}) * advantage)"
        return clipped if self.dual is None else dual_code(lines, clipped, self.dual)

    def notes(self) -> tuple[str, ...]:
        if self.dual is None or self.dual > 1 + self.high:
            return ()
        return (f"note: the dual clip at {self.dual:g} is inside the clip range, it acts before the upper clip could",)


@dataclass(frozen=True)
class Reinforce(Surrogate):
    """CISPO's term, sg[min(r, ceiling)] A log pi: the ratio is a capped weight, every token keeps a gradient.

    arXiv 2506.13585, with an absolute ceiling and no floor (ScaleRL, arXiv 2510.13786); `inf` means no ceiling.
    Without the weight it would be `LogProb`, the surrogate of the preset `reinforce`.
    """

    bounds_ratio = True
    ceiling: Number = within("[1, inf]", 5.0)

    def __call__(self, terms: Terms, state: State) -> Value:
        ratio = terms.ratio.detach()
        value = ratio.clamp(max=self.ceiling) * terms.advantage * terms.logp
        return value, terms.share("clip/high", ratio > self.ceiling)

    def equation(self, ratio: str) -> str:
        weight = ratio if self.ceiling == math.inf else f"min({ratio}, {self.ceiling:g})"
        return f"sg[{weight}] A log π"

    def code(self, lines: Lines) -> str:
        capped = "" if self.ceiling == math.inf else f".clamp(max={self.ceiling})"
        return f"ratio.detach(){capped} * advantage * current"


@dataclass(frozen=True)
class Regression(Surrogate):
    """-(beta S - A)^2 for a sequence, S = sum_t (log pi - log mu): OAPL, arXiv 2602.19362 eq. 3.

    Needs the ratio at sequence level. Each token carries 1/T of the value and the gradient of that token's log-prob, so
    that the sum over tokens is the square with its exact gradient.
    """

    per_response = True
    single_policy = True
    learns_without_advantage = True
    ratio_levels = ("sequence",)
    ratio_because = "squares the log-ratio of a whole response"
    beta: Number = within("(0, inf)", 1e-3)

    def __call__(self, terms: Terms, state: State) -> Value:
        log = terms.log_ratio.detach()
        residual = self.beta * log - terms.advantage
        share = residual.square() / terms.sequences.spread(terms.sequences.lengths.clamp(min=1))
        value = share + 2.0 * self.beta * residual * (terms.log_ratio - log)
        return -value, {}

    def equation(self, ratio: str) -> str:
        return f"−({self.beta:g}·log {ratio} − A)²/T"

    def code(self, lines: Lines) -> str:
        residual = lines.define("residual", f"{self.beta} * sequence_log_ratio - advantage")
        slope = f"{2 * self.beta} * {residual} * (token_log_ratio - token_log_ratio.detach())"
        return f"-({residual}.square() / length + {slope})"

    def refusal(self, ratio: Ratio, aggregation: Aggregation, *, corrected: bool) -> str | None:
        if aggregation.kind == "seq-mean-token-mean":
            return (
                "Regression divides a response's square by its length already: use aggregation "
                '"trained-mean-token-sum" or "seq-mean-token-sum"'
            )
        return super().refusal(ratio, aggregation, corrected=corrected)


@dataclass(frozen=True)
class Shaped(Surrogate):
    """r A, unclipped, at on-policy tokens; f(pi) A with f(x) = x / (x + gamma) at external tokens.

    LUFFY (arXiv 2504.14945): the behavior probability of an external token is taken as 1.
    """

    reads = frozenset({"off_policy"})
    gamma: Number = within("(0, inf)", 0.1)

    def __call__(self, terms: Terms, state: State) -> Value:
        # pi / (pi + gamma) = sigmoid(log pi - log gamma), which cannot overflow.
        shaped = torch.sigmoid(terms.logp - math.log(self.gamma))
        factor = torch.where(terms.on_policy, terms.ratio, shaped)
        return factor * terms.advantage, terms.share("off_policy/tokens", ~terms.on_policy)

    def equation(self, ratio: str) -> str:
        return f"({ratio} A on-policy, π/(π + {self.gamma:g}) A off-policy)"

    def code(self, lines: Lines) -> str:
        shaped = f"(current + {-math.log(self.gamma)}).sigmoid()  # pi / (pi + {self.gamma:g})"
        for name in ("proximal", "behavior"):  # external tokens have no such policy
            lines.values[name] = f"torch.where(mask & ~off_policy, {name}.detach(), current.detach())"
        return f"torch.where(off_policy, {lines.define('shaped', shaped)}, ratio) * advantage"

    def refusal(self, ratio: Ratio, aggregation: Aggregation, *, corrected: bool) -> str | None:
        if not corrected:
            return None
        return "Shaped trains tokens without a behavior policy, which a weight or a mask would read: leave these out"


@dataclass(frozen=True)
class LogProb(Surrogate):
    """A log pi: the policy gradient without a ratio, as if on-policy (REINFORCE, Williams 1992).

    Its metrics still measure current/proximal (`ratio/`, `update/kl`), which shows how far updates move the policy.
    """

    ratio_levels, ratio_over = ("token",), ("proximal",)
    ratio_because = "has no ratio, so its level and policy have no effect"

    def __call__(self, terms: Terms, state: State) -> Value:
        return terms.advantage * terms.logp, {}

    def equation(self, ratio: str) -> str:
        return "A log π"

    def code(self, lines: Lines) -> str:
        return "advantage * current"


@dataclass(frozen=True)
class Unclipped(Surrogate):
    """r A: the plain importance-weighted policy gradient."""

    def __call__(self, terms: Terms, state: State) -> Value:
        return terms.ratio * terms.advantage, {}

    def equation(self, ratio: str) -> str:
        return f"{ratio} A"

    def code(self, lines: Lines) -> str:
        return "ratio * advantage"


def dual_code(lines: Lines, clipped: str, dual: Number | str) -> str:
    """Returns a clipped term that is at least dual * A for A < 0, as PyTorch code."""
    clipped = lines.define("clipped", clipped)
    return f"torch.where(advantage < 0, torch.maximum({clipped}, {dual} * advantage), {clipped})"
