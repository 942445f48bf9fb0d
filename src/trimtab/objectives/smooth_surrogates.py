"""Surrogates that damp large ratios smoothly instead of clipping them: SAPO, VESPO, GMPO, DRPO."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.corrections.arguments import within
from trimtab.corrections.code_lines import Lines, clamped
from trimtab.corrections.ratios import LOG_RATIO_BOUND, Number, at_level, bounded, ratio_excess
from trimtab.corrections.statistics import Mean
from trimtab.errors import TrimtabError
from trimtab.objectives.aggregation import Aggregation
from trimtab.objectives.policies import Ratio
from trimtab.objectives.state import State
from trimtab.objectives.surrogates import Surrogate, Terms, Value


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

    def refusal(self, ratio: Ratio, aggregation: Aggregation, *, corrected: bool) -> str | None:
        if ratio.level == "sequence":
            return None
        return (
            f'GammaWeight shapes the product over a response, not a ratio at {ratio.level} level: use level "sequence"'
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

    def refusal(self, ratio: Ratio, aggregation: Aggregation, *, corrected: bool) -> str | None:
        if ratio.level != "token":
            return f'GeometricClip takes the mean of token ratios itself: use level "token", not {ratio.level!r}'
        return None

    def unbounded(self) -> Surrogate:
        return GeometricClip(math.inf, math.inf)


@dataclass(frozen=True)
class QuadraticPenalty(Surrogate):
    """w A - |A| mu (w - 1)^2 / (2 epsilon): the gradient falls linearly with the gap pi - mu, then reverses.

    The gradient is 0 at pi - mu = sign(A) epsilon and pulls back beyond it. DRPO, arXiv 2606.09821. `epsilon` is a
    difference of probabilities, as DPPO's bound (the paper's value of 12.5 would leave the ratio nearly unbounded).
    """

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

    def refusal(self, ratio: Ratio, aggregation: Aggregation, *, corrected: bool) -> str | None:
        if ratio == Ratio("token", "behavior"):
            return None
        return 'QuadraticPenalty bounds the gap between π and μ of a token: use the ratio "token" over "behavior"'
