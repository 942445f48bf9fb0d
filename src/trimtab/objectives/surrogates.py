"""Surrogates: what each token adds to the objective (to be maximised), given its log-ratio and advantage.

A surrogate sees selected tensors (0 where untrained) and an exponent inside its safety bound, so everything it
computes is finite and nothing rejected later can leave a NaN in the gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from trimtab.corrections.ratios import Number, bounded
from trimtab.corrections.reduce import Sequences
from trimtab.corrections.statistics import Mean, Mergeable
from trimtab.errors import TrimtabError, nearest
from trimtab.objectives.state import NO_EVIDENCE, State

HARM_FLOOR = 1e-12
"""Advantages smaller than this are neither good nor bad (M2PO's official code)."""

SECOND_MOMENT_FORMS = ("cap", "mask")


@dataclass(frozen=True, eq=False)
class Terms:
    """What a surrogate may read, all (batch, time) and 0 where the mask is False.

    log_ratio: at the objective's level, with the gradient of each token's own log-prob, not yet bounded.
    token_log_ratio: the same at token level.
    logp: log pi of the current policy, with gradient.
    on_policy: trained tokens that have a behavior policy, all but LUFFY's external ones.
    """

    log_ratio: Float[Tensor, "batch time"]
    token_log_ratio: Float[Tensor, "batch time"]
    logp: Float[Tensor, "batch time"]
    advantage: Float[Tensor, "batch time"]
    mask: Bool[Tensor, "batch time"]
    on_policy: Bool[Tensor, "batch time"]
    sequences: Sequences

    @property
    def ratio(self) -> Float[Tensor, "batch time"]:
        return bounded(self.log_ratio).exp()

    def share(self, name: str, where: Bool[Tensor, "batch time"]) -> dict[str, Mergeable]:
        return {name: Mean.of(where & self.mask, self.mask)}


Value = tuple[Float[Tensor, "batch time"], dict[str, Mergeable]]


@runtime_checkable
class Surrogate(Protocol):
    """A point in the space of policy terms."""

    def __call__(self, terms: Terms, state: State) -> Value:
        """The objective of each token, and statistics of what the surrogate did."""
        ...


@dataclass(frozen=True)
class Clipped:
    """min(r A, clip(r, 1 - low, 1 + high) A), and for A < 0 at least dual * A.

    PPO (arXiv 1707.06347 eq. 7), asymmetric as in DAPO (2503.14476), dual clip of arXiv 1912.09729.
    """

    low: Number = 0.2
    high: Number = 0.2
    dual: Number | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.low <= 1:
            raise TrimtabError(f"clip_low = {self.low:g}: the bound is 1 - clip_low, use a value in [0, 1]")
        if not self.high >= 0:
            raise TrimtabError(f"clip_high = {self.high:g}: the bound is 1 + clip_high, use 0 or more")
        if self.dual is not None and not self.dual > 1:
            raise TrimtabError(f"clip_dual = {self.dual:g}: it bounds the ratio from above, use more than 1")

    def __call__(self, terms: Terms, state: State) -> Value:  # noqa: ARG002
        ratio, advantage = terms.ratio, terms.advantage
        low, high = 1.0 - self.low, 1.0 + self.high
        value = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
        statistics = {
            **terms.share("clip/low", (advantage < 0) & (ratio < low)),
            **terms.share("clip/high", (advantage > 0) & (ratio > high)),
        }
        if self.dual is not None:
            # For A >= 0 the floor dual * A would act from the wrong side.
            value = torch.where(advantage < 0, torch.maximum(value, self.dual * advantage), value)
            statistics |= terms.share("clip/dual", (advantage < 0) & (ratio > self.dual))
        return value, statistics


@dataclass(frozen=True)
class Reinforce:
    """sg[min(r, ceiling)] A log pi: the weight is capped, the gradient of no token is lost.

    CISPO (arXiv 2506.13585) with an absolute ceiling and no floor (ScaleRL, arXiv 2510.13786).
    """

    ceiling: Number = 5.0

    def __post_init__(self) -> None:
        if not self.ceiling >= 1:
            raise TrimtabError(f"ceiling = {self.ceiling:g} bounds the ratio itself, use 1 or more")

    def __call__(self, terms: Terms, state: State) -> Value:  # noqa: ARG002
        ratio = terms.ratio.detach()
        value = ratio.clamp(max=self.ceiling) * terms.advantage * terms.logp
        return value, terms.share("clip/high", ratio > self.ceiling)


@dataclass(frozen=True)
class Regression:
    """-(beta S - A)^2 for a sequence, S = sum_t (log pi - log mu): OAPL, arXiv 2602.19362 eq. 3.

    Reads the log-ratio at sequence level. Each token carries 1/T of the value and the gradient of its own log-prob, so
    that the sum over tokens is the square with its exact gradient.
    """

    beta: Number = 1e-3

    def __post_init__(self) -> None:
        if not self.beta > 0:
            raise TrimtabError(f"beta = {self.beta:g}: the regression target is scaled by it, use more than 0")

    def __call__(self, terms: Terms, state: State) -> Value:  # noqa: ARG002
        own = terms.log_ratio.detach()
        residual = self.beta * own - terms.advantage
        share = residual.square() / terms.sequences.spread(terms.sequences.lengths.clamp(min=1))
        value = share + 2.0 * self.beta * residual * (terms.log_ratio - own)
        return -value, {}


@dataclass(frozen=True)
class Shaped:
    """On-policy tokens r A, unclipped; external tokens f(pi) A with f(x) = x / (x + gamma).

    LUFFY (arXiv 2504.14945): the behavior probability of an external token is taken as 1.
    """

    gamma: Number = 0.1

    def __post_init__(self) -> None:
        if not self.gamma > 0:
            raise TrimtabError(f"gamma = {self.gamma:g}: f(x) = x / (x + gamma) needs more than 0")

    def __call__(self, terms: Terms, state: State) -> Value:  # noqa: ARG002
        # pi / (pi + gamma) = sigmoid(log pi - log gamma), which cannot overflow.
        shaped = torch.sigmoid(terms.logp - math.log(self.gamma))
        factor = torch.where(terms.on_policy, terms.ratio, shaped)
        return factor * terms.advantage, terms.share("off_policy/tokens", ~terms.on_policy)


@dataclass(frozen=True)
class SecondMoment:
    """r A while the second moment of the log-ratios is within `tau`: M2PO (arXiv 2510.01161), in two forms.

    cap: harmful tokens (A > 0, r > 1 or A < 0, r < 1) are judged; r is clipped at exp(+-c), where the cap c keeps their
        capped second moment at `tau` (the official code).
    mask: all trained tokens are judged; those with the largest |log r| are left out until the mean square of the rest
        is at most `tau`, and nothing is clipped (the paper). What is left out stays in the denominator.
    """

    tau: Number = 0.04
    form: str = "cap"

    def __post_init__(self) -> None:
        if not self.tau > 0:
            raise TrimtabError(f"tau = {self.tau:g}: the second moment allowed must be more than 0")
        if self.form not in SECOND_MOMENT_FORMS:
            raise TrimtabError(f"unknown form {self.form!r}{nearest(self.form, SECOND_MOMENT_FORMS)}")

    def evidence(self, terms: Terms) -> Float[Tensor, "tokens"]:
        """|log-ratio| of the tokens that are judged, negative for all others. No gradient."""
        own = terms.log_ratio.detach()
        judged = terms.on_policy
        if self.form == "cap":
            judged = (own * terms.advantage.sign() > 0) & (terms.advantage.abs() > HARM_FLOOR)
        return torch.where(judged, own.abs(), NO_EVIDENCE).reshape(-1)

    def __call__(self, terms: Terms, state: State) -> Value:
        return self._capped(terms, state) if self.form == "cap" else self._masked(terms, state)

    def _capped(self, terms: Terms, state: State) -> Value:
        cap, advantage = state.second_moment_cap(self.tau).to(terms.logp.dtype), terms.advantage
        # Clamped as a log: the token whose log-ratio is the cap is inside, whatever the rounding of exp.
        clipped = bounded(terms.log_ratio.clamp(-cap, cap)).exp()
        value = torch.minimum(terms.ratio * advantage, clipped * advantage)
        own = terms.log_ratio.detach()
        statistics = {
            **terms.share("clip/low", (advantage < 0) & (own < -cap)),
            **terms.share("clip/high", (advantage > 0) & (own > cap)),
        }
        return value, statistics

    def _masked(self, terms: Terms, state: State) -> Value:
        limit = state.second_moment_limit(self.tau).to(terms.logp.dtype)
        outside = terms.log_ratio.detach().abs() > limit
        value = torch.where(outside, 0.0, terms.ratio * terms.advantage)
        return value, terms.share("clip/second_moment", outside)


@dataclass(frozen=True)
class LogProb:
    """A log pi: the policy gradient as if every token were the current policy's own (REINFORCE, Williams 1992)."""

    def __call__(self, terms: Terms, state: State) -> Value:  # noqa: ARG002
        return terms.advantage * terms.logp, {}


@dataclass(frozen=True)
class Unclipped:
    """r A: the plain importance-weighted policy gradient."""

    def __call__(self, terms: Terms, state: State) -> Value:  # noqa: ARG002
        return terms.ratio * terms.advantage, {}
