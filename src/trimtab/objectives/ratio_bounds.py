"""Surrogates that bound the ratio in other ways than a fixed clip.

Bounds that depend on the position or age of a token, or on the update: CTPO, PNPO, A-3PO, M2PO.
Smooth weights and penalties instead of a clip: SAPO, VESPO, GMPO, DRPO.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from trimtab.corrections.code_lines import Lines, clamped
from trimtab.corrections.fields import one_of, within
from trimtab.corrections.ratios import LOG_RATIO_BOUND, PREFIX_LEVELS, Number, at_level, bounded, ratio_excess
from trimtab.corrections.statistics import Mean
from trimtab.errors import TrimtabError
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

    ratio_levels = PREFIX_LEVELS
    ratio_because = "bounds the ratio of a prefix by its length"
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

    ratio_over = ("behavior",)
    ratio_because = "clips current/behavior by the age of its sampler"
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


def _by_sign(where: Tensor, positive: Number, negative: Number, like: Tensor) -> Tensor:
    """Returns `positive` at True, else `negative`, not rounded to float32 as `torch.where` with two numbers does."""
    return torch.where(where, like.new_full((), positive), like.new_full((), negative))


def _code_by_sign(where: str, positive: Number, negative: Number) -> str:
    """Returns `_by_sign` as PyTorch code: a number if `positive` and `negative` are equal."""
    chosen = f"torch.full_like(current, {negative}).masked_fill({where}, {positive})"
    return f"{positive}" if positive == negative else chosen


@dataclass(frozen=True)
class SoftGate(Surrogate):
    """(4 / tau) sigmoid(tau (r - 1)) A with tau = `positive` for A > 0 and `negative` otherwise.

    The weight of a token's gradient is 1 at r = 1 and falls smoothly on both sides. The value at r = 1 is 2 A / tau,
    not A: losses are not comparable with those of other objectives. SAPO, arXiv 2511.20347.
    """

    bounds_ratio = True
    positive: Number = within("(0, inf)", 1.0)
    negative: Number = within("(0, inf)", 1.05)

    def __call__(self, terms: Terms, state: State) -> Value:
        advantage = terms.advantage
        tau = _by_sign(advantage > 0, self.positive, self.negative, advantage)
        gate = torch.sigmoid(tau * ratio_excess(terms.log_ratio))
        weight = 4.0 * gate * (1 - gate) * terms.ratio
        return 4.0 / tau * gate * advantage, {"clip/weight": Mean.of(weight.detach() * terms.mask, terms.mask)}

    def equation(self, ratio: str) -> str:
        return f"(4/τ) σ(τ ({ratio} − 1)) A"

    def code(self, lines: Lines) -> str:
        return lines.write(f"""
            tau = {_code_by_sign("advantage > 0", self.positive, self.negative)}
            excess = torch.expm1({clamped("log_ratio")})  # ratio - 1
            4 / tau * (tau * excess).sigmoid() * advantage
            """)

    def notes(self) -> tuple[str, ...]:
        return (f"τ = {self.positive:g} where A > 0, {self.negative:g} elsewhere",)


@dataclass(frozen=True)
class GammaWeight(Surrogate):
    """sg[phi(W)] A log pi with phi(W) = e^k2 W^k1 e^(-k2 W) of the product W = current/behavior of the response.

    phi is 1 at W = 1, largest at W = k1 / k2 and falls to 0 on both sides. No length normalization: the weights of long
    responses vanish as their products spread; `clip/weight` is the mean. VESPO, arXiv 2602.10693; the defaults are
    those of its code and of TRL, (k1, k2) = (2, 3) for A >= 0 and (3, 2) for A < 0.
    """

    ratio_levels = ("sequence",)
    ratio_because = "shapes the product over a response"
    k1_positive: Number = within("[0, inf)", 2.0)
    k2_positive: Number = within("[0, inf)", 3.0)
    k1_negative: Number = within("[0, inf)", 3.0)
    k2_negative: Number = within("[0, inf)", 2.0)

    def __post_init__(self) -> None:
        self.check_fields()
        for k1, k2 in ((self.k1_positive, self.k2_positive), (self.k1_negative, self.k2_negative)):
            if _largest_exponent(k1, k2) > LOG_RATIO_BOUND:
                raise TrimtabError(
                    f"k1, k2 = {k1:g}, {k2:g}: the weight W^k1 e^(-k2 (W - 1)) grows beyond e^{LOG_RATIO_BOUND:g}, use "
                    "a larger k2 or a smaller k1"
                )

    def __call__(self, terms: Terms, state: State) -> Value:
        positive, log = terms.advantage >= 0, bounded(terms.log_ratio.detach())
        power = _by_sign(positive, self.k1_positive, self.k1_negative, log)
        rate = _by_sign(positive, self.k2_positive, self.k2_negative, log)
        # One exponent, whose maximum was checked: no factor can overflow.
        weight = (power * log - rate * torch.expm1(log)).exp()
        return weight * terms.advantage * terms.logp, {"clip/weight": Mean.of(weight * terms.mask, terms.mask)}

    def equation(self, ratio: str) -> str:
        return f"sg[{ratio}^k1 e^(−k2 ({ratio} − 1))] A log π"

    def code(self, lines: Lines) -> str:
        return lines.write(f"""
            log_bounded = {clamped("sequence_log_ratio")}
            k1 = {_code_by_sign("advantage >= 0", self.k1_positive, self.k1_negative)}
            k2 = {_code_by_sign("advantage >= 0", self.k2_positive, self.k2_negative)}
            phi = (log_bounded * k1 - torch.expm1(log_bounded) * k2).exp()
            phi * advantage * current
            """)

    def notes(self) -> tuple[str, ...]:
        positive, negative = (self.k1_positive, self.k2_positive), (self.k1_negative, self.k2_negative)
        return (
            f"(k1, k2) = ({positive[0]:g}, {positive[1]:g}) where A ≥ 0, ({negative[0]:g}, {negative[1]:g}) elsewhere",
        )


def _largest_exponent(k1: Number, k2: Number) -> float:
    """Returns the maximum of k1 log W - k2 (W - 1) over the bounded ratios, which lies at W = k1 / k2."""
    if k1 == 0:
        return float(k2)
    log = LOG_RATIO_BOUND if k2 == 0 else min(math.log(k1 / k2), LOG_RATIO_BOUND)
    return k1 * log - k2 * math.expm1(log)


@dataclass(frozen=True)
class GeometricClip(Surrogate):
    """A times the geometric mean over the response of the token ratios, each clipped at exp(high) or exp(-low) first.

    The bounds are on log r: high for A > 0, -low for A < 0. Each token has the value of the response and the gradient
    of its own log-prob (0 if clipped), so that the mean over tokens has the exact gradient. GMPO, arXiv 2507.20673.
    """

    ratio_levels = ("token",)
    ratio_because = "takes the mean of token ratios itself"
    per_response = True
    low: Number = within("[0, inf]", 0.4)
    high: Number = within("[0, inf]", 0.4)

    def __call__(self, terms: Terms, state: State) -> Value:
        log, advantage = terms.token_log_ratio, terms.advantage
        clipped = torch.where(advantage > 0, log.clamp(max=self.high), log.clamp(min=-self.low))
        value = bounded(at_level(clipped, terms.sequences, "geometric")).exp() * advantage
        return value, terms.clipped(log.detach(), -self.low, self.high)

    def equation(self, ratio: str) -> str:
        return f"(Π_t clip(r_t; A<0: ≥ e^−{self.low:g}, A>0: ≤ e^{self.high:g}))^(1/T) A"

    def code(self, lines: Lines) -> str:
        return lines.write(f"""
            log_clipped = torch.where(advantage > 0, log_ratio.clamp(max={self.high}), log_ratio.clamp(min={-self.low}))
            mean = log_clipped.detach().sum(1, keepdim=True) / length
            log_mean = mean + (log_clipped - log_clipped.detach())  # with each token's own gradient
            {clamped("log_mean")}.exp() * advantage
            """)

    def unbounded(self) -> Surrogate:
        return GeometricClip(math.inf, math.inf)


@dataclass(frozen=True)
class QuadraticPenalty(Surrogate):
    """w A - |A| mu (w - 1)^2 / (2 epsilon): the gradient falls linearly with the gap pi - mu, then reverses.

    The gradient is 0 at pi - mu = sign(A) epsilon and pulls back beyond it. DRPO, arXiv 2606.09821. `epsilon` is a
    difference of probabilities, as DPPO's bound (the paper's value of 12.5 would leave the ratio nearly unbounded).
    """

    ratio_levels, ratio_over = ("token",), ("behavior",)
    ratio_because = "bounds the gap between π and μ of a token"
    reads = frozenset({"behavior"})
    bounds_ratio = True
    epsilon: Number = within("(0, inf)", 0.15)

    def __call__(self, terms: Terms, state: State) -> Value:
        assert terms.behavior is not None
        advantage, excess = terms.advantage, ratio_excess(terms.log_ratio)
        sampler = terms.behavior.clamp(max=0).exp()
        penalty = advantage.abs() * sampler * excess.square() / (2 * self.epsilon)
        gap = sampler * excess.detach()
        return (1 + excess) * advantage - penalty, terms.share("clip/turned", advantage.sign() * gap > self.epsilon)

    def equation(self, ratio: str) -> str:
        return f"({ratio} A − |A| μ ({ratio} − 1)²/{2 * self.epsilon:g})"

    def code(self, lines: Lines) -> str:
        return lines.write(f"""
            excess = torch.expm1({clamped("log_ratio")})  # ratio - 1
            mu = behavior.clamp(max=0).exp()
            (1 + excess) * advantage - advantage.abs() * mu * excess.square() / {2 * self.epsilon}
            """)
