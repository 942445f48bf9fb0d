"""Surrogates whose bounds depend on the position or age of a token, or on the update: CTPO, PNPO, A-3PO, M2PO."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from trimtab.corrections.arguments import one_of, within
from trimtab.corrections.code_lines import Lines, clamped
from trimtab.corrections.ratios import PREFIX_LEVELS, Number, bounded
from trimtab.objectives.aggregation import Aggregation
from trimtab.objectives.policies import Ratio
from trimtab.objectives.state import NOT_COUNTED, State
from trimtab.objectives.surrogates import Surrogate, Terms, Value, dual_code

LOG_PREFIX_BOUND = 10.0
"""Largest log-ratio of a prefix (CTPO's code)."""


@dataclass(frozen=True)
class GrowingClip(Surrogate):
    """min(r A, clip(r) A) with bounds on log r that grow with the position n of the token: [-low n^p, high n^p].

    For A < 0 the term is at least exp(dual n^p) A. The `power` p is 1/2 for the product over the prefix, whose
    logarithm is a random walk, and -1/2 for its geometric mean. CTPO, arXiv 2605.07331.
    """

    bounds_ratio = True
    low: Number = within("[0, inf]", 0.025)
    high: Number = within("[0, inf]", 0.05)
    dual: Number | None = within("(0, inf]", 0.05, optional=True)
    power: Number = within("(-inf, inf)", 0.5)

    def __call__(self, terms: Terms, state: State) -> Value:
        scale = terms.sequences.positions.clamp(min=1).to(terms.log_ratio.dtype) ** self.power
        log, advantage = terms.log_ratio.clamp(max=LOG_PREFIX_BOUND), terms.advantage
        clipped = torch.minimum(torch.maximum(log, -self.low * scale), self.high * scale)
        value = torch.minimum(bounded(log).exp() * advantage, bounded(clipped).exp() * advantage)
        statistics = terms.clipped(log.detach(), -self.low * scale, self.high * scale)
        if self.dual is not None:
            ceiling = (self.dual * scale).clamp(max=LOG_PREFIX_BOUND)
            value = torch.where(advantage < 0, torch.maximum(value, ceiling.exp() * advantage), value)
            statistics |= terms.share("clip/dual", (advantage < 0) & (log.detach() > ceiling))
        return value, statistics

    def equation(self, ratio: str) -> str:
        clipped = f"min({ratio} A, clip({ratio}, e^(−{self.low:g} n^p), e^({self.high:g} n^p)) A)"
        return clipped if self.dual is None else f"max[A<0]({clipped}, e^({self.dual:g} n^p) A)"

    def code(self, lines: Lines) -> str:
        clipped = lines.write(f"""
            scale = position.to(current.dtype) ** {self.power}
            log_bounded = log_ratio.clamp(max={LOG_PREFIX_BOUND})
            log_clipped = torch.minimum(torch.maximum(log_bounded, {-self.low} * scale), {self.high} * scale)
            torch.minimum({clamped("log_bounded")}.exp() * advantage, {clamped("log_clipped")}.exp() * advantage)
            """)
        if self.dual is None:
            return clipped
        dual = lines.define("dual", f"({self.dual} * scale).clamp(max={LOG_PREFIX_BOUND}).exp()")
        return dual_code(lines, clipped, dual)

    def notes(self) -> tuple[str, ...]:
        return (f"n: position of the token among the trained ones of its response, p = {self.power:g}",)

    def refusal(self, ratio: Ratio, aggregation: Aggregation, *, corrected: bool) -> str | None:
        if ratio.level in PREFIX_LEVELS:
            return None
        return f'GrowingClip bounds the ratio of a prefix by its length: use level "prefix", not {ratio.level!r}'


@dataclass(frozen=True)
class Banded(Surrogate):
    """r A if 1 - low <= r <= 1 + high, otherwise 0: the ratio is both the weight and the acceptance test.

    With the geometric mean of the prefix as r: PNPO, arXiv 2608.01418. Dropped tokens stay in the denominator.
    """

    bounds_ratio = True
    low: Number = within("[0, 1]", 0.2)
    high: Number = within("[0, inf]", 0.2)

    def __call__(self, terms: Terms, state: State) -> Value:
        ratio = terms.ratio
        below, above = ratio.detach() < 1 - self.low, ratio.detach() > 1 + self.high
        value = torch.where(below | above, 0.0, ratio * terms.advantage)
        return value, {**terms.share("clip/low", below), **terms.share("clip/high", above)}

    def equation(self, ratio: str) -> str:
        return f"1[{1 - self.low:g} ≤ {ratio} ≤ {1 + self.high:g}]·{ratio} A"

    def code(self, lines: Lines) -> str:
        return f"torch.where((ratio >= {1 - self.low}) & (ratio <= {1 + self.high}), ratio * advantage, 0.0)"


@dataclass(frozen=True)
class AgedClip(Surrogate):
    """min(w A, clip(w) A) with w = current/behavior, clipped to [(1 - low)^d, (1 + high)^d] for a token of age d.

    It has the gradient of A-3PO (arXiv 2512.06547), which interpolates the proximal policy between sampler and current
    policy by age: a decoupled loss without a proximal forward. Tokens of age 0 are not clipped.
    """

    reads = frozenset({"age"})
    bounds_ratio = True
    low: Number = within("[0, 1)", 0.2)
    high: Number = within("[0, inf]", 0.2)

    def __call__(self, terms: Terms, state: State) -> Value:
        assert terms.age is not None
        age = terms.age.clamp(min=0).to(terms.log_ratio.dtype)
        log, advantage = bounded(terms.log_ratio), terms.advantage
        low = torch.where(age > 0, age * math.log1p(-self.low), -math.inf)
        high = torch.where(age > 0, age * math.log1p(self.high), math.inf)
        clipped = torch.minimum(torch.maximum(log, low), high)
        value = torch.minimum(log.exp() * advantage, clipped.exp() * advantage)
        return value, terms.clipped(log.detach(), low, high)

    def equation(self, ratio: str) -> str:
        return f"min({ratio} A, clip({ratio}, {1 - self.low:g}^d, {1 + self.high:g}^d) A)"

    def code(self, lines: Lines) -> str:
        return lines.write(f"""
            d = age.clamp(min=0).to(current.dtype)  # 0 is not clipped
            clipped = torch.minimum(torch.maximum(ratio, {1 - self.low} ** d), {1 + self.high} ** d)
            torch.minimum(ratio * advantage, torch.where(d > 0, clipped, ratio) * advantage)
            """)

    def notes(self) -> tuple[str, ...]:
        return ("d: age of the token in training steps, 1 for the policy that the step began with",)

    def refusal(self, ratio: Ratio, aggregation: Aggregation, *, corrected: bool) -> str | None:
        if ratio.over == "behavior":
            return None
        return 'AgedClip clips current/behavior by the age of its sampler: use a ratio over "behavior"'


HARM_FLOOR = 1e-12
"""Smallest |advantage| for which a token can count as harmful (M2PO's official code)."""


@dataclass(frozen=True)
class SecondMoment(Surrogate):
    """r A while the second moment of the log-ratios is within `tau`: M2PO (arXiv 2510.01161), in two forms.

    cap: r is clipped at exp(+-c); the cap c keeps the capped second moment of the harmful tokens (A > 0, r > 1 or
        A < 0, r < 1) at `tau` (the official code).
    mask: the tokens with the largest |log r| are dropped until the mean square of all other trained tokens is at most
        `tau`; nothing is clipped (the paper). Dropped tokens stay in the denominator.
    """

    collects = True
    bounds_ratio = True
    tau: Number = within("(0, inf)", 0.04)
    form: str = one_of(("cap", "mask"), "cap")

    def magnitudes(self, terms: Terms) -> Float[Tensor, "tokens"]:
        """Returns |log-ratio| of the tokens in the second moment, negative for all others. No gradient."""
        log = terms.log_ratio.detach()
        counted = terms.on_policy
        if self.form == "cap":
            counted = (log * terms.advantage.sign() > 0) & (terms.advantage.abs() > HARM_FLOOR)
        return torch.where(counted, log.abs(), NOT_COUNTED).reshape(-1)

    def __call__(self, terms: Terms, state: State) -> Value:
        if self.form == "mask":
            limit = state.second_moment_limit(self.tau).to(terms.logp.dtype)
            outside = terms.log_ratio.detach().abs() > limit
            value = torch.where(outside, 0.0, terms.ratio * terms.advantage)
            return value, terms.share("clip/second_moment", outside)
        cap, advantage = state.second_moment_cap(self.tau).to(terms.logp.dtype), terms.advantage
        # The log is clamped, not the ratio: a token exactly at the cap stays unclipped whatever the rounding of exp.
        clipped = bounded(terms.log_ratio.clamp(-cap, cap)).exp()
        value = torch.minimum(terms.ratio * advantage, clipped * advantage)
        return value, terms.clipped(terms.log_ratio.detach(), -cap, cap)

    def equation(self, ratio: str) -> str:
        if self.form == "cap":
            return f"min({ratio} A, clip({ratio}, e^−c, e^c) A)"
        return f"1[|log {ratio}| ≤ c]·{ratio} A"

    def code(self, lines: Lines) -> str:
        lines.of_update["limit"] = "the limit c on |log ratio|"
        if self.form == "mask":
            return lines.write(f"""
                size = log_ratio.detach().abs()[mask].double().sort().values
                within = size.square().cumsum(0) <= {self.tau} * torch.arange(1, len(size) + 1, device=size.device)
                last = torch.cat([size[1:] > size[:-1], within.new_ones(1)])[: len(size)]  # of equal ones
                limit = torch.cat([size.new_full((1,), -1.0), size[within & last]]).max()
                torch.where(log_ratio.abs() <= limit, ratio * advantage, 0.0)
                """)
        return lines.write(f"""
            harmful = (log_ratio * advantage > 0) & (advantage.abs() > {HARM_FLOOR})
            size = log_ratio.detach().abs()[harmful].double().sort().values
            capped = size.square().cumsum(0) + size.square() * torch.arange(len(size) - 1, -1, -1, device=size.device)
            cap = torch.cat([size.new_zeros(1), size[capped < {self.tau} * len(size)]]).max()
            limit = torch.where(size.square().sum() <= {self.tau} * len(size), inf, cap)
            clipped = {clamped("log_ratio.clamp(-limit, limit)")}.exp()
            torch.minimum(ratio * advantage, clipped * advantage)
            """)

    def notes(self) -> tuple[str, ...]:
        if self.form == "cap":
            return (f"c: largest harmful |log r| whose capped second moment stays below {self.tau:g}; ∞ within it",)
        return (
            f"c: largest |log r| of the update up to which the mean of log² r is at most {self.tau:g}; "
            "what is beyond stays in D",
        )
