"""Surrogates: the per-token term that is maximized, as a function of log-ratio and advantage.

A surrogate reads selected tensors (0 where untrained) and a ratio whose exponent is bounded, so that all values are
finite and a token rejected later leaves no NaN in the gradient. A new one is a frozen dataclass that inherits from
`Surrogate`, here or in a file of your own: docs/objectives.md.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from trimtab.corrections.protocols import Peers, Setting
from trimtab.corrections.ratios import TURN_LEVELS, Number, bounded
from trimtab.corrections.reduce import Sequences
from trimtab.corrections.statistics import Mean, Mergeable
from trimtab.errors import TrimtabError, did_you_mean
from trimtab.objectives.aggregation import Aggregation
from trimtab.objectives.policies import Ratio
from trimtab.objectives.state import NO_EVIDENCE, State

HARM_FLOOR = 1e-12
"""Smallest |advantage| for which a token can count as harmful (M2PO's official code)."""

SECOND_MOMENT_FORMS = ("cap", "mask")


@dataclass(frozen=True, eq=False)
class Terms:
    """The inputs of a surrogate, all (batch, time) and 0 where the mask is False.

    log_ratio: at the objective's level, not bounded, with the gradient of each token's own log-prob.
    token_log_ratio: the same at token level.
    logp: log pi of the current policy, with gradient.
    on_policy: trained tokens that have a behavior policy; False at LUFFY's external tokens.
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
        """The ratio, its exponent bounded, with gradient."""
        return bounded(self.log_ratio).exp()

    def share(self, name: str, where: Bool[Tensor, "batch time"]) -> dict[str, Mergeable]:
        """Returns the share of trained tokens at which `where` holds, as a metric."""
        return {name: Mean.of(where & self.mask, self.mask)}


Value = tuple[Float[Tensor, "batch time"], dict[str, Mergeable]]


class Surrogate(ABC):
    """The base class of policy terms. A subclass is a frozen dataclass with `__call__` and `equation`."""

    @abstractmethod
    def __call__(self, terms: Terms, state: State) -> Value:
        """Returns the term of each token (to be maximized), and statistics such as clipped shares by metric key."""

    @abstractmethod
    def equation(self, ratio: str) -> str:
        """Returns the term as text with its numbers; `ratio` is the symbol of the ratio."""

    def notes(self) -> tuple[str, ...]:
        """Returns further lines of the equation: definitions of symbols and warnings."""
        return ()

    @property
    def reads(self) -> frozenset[str]:
        """Fields of `PolicyLogps` read besides `current` and the ratio's denominator."""
        return frozenset()

    def refusal(self, ratio: Ratio, aggregation: Aggregation, *, corrected: bool) -> str | None:  # noqa: ARG002
        """Returns why it cannot be combined with these parts, or None. `corrected`: there is a weight or a mask."""
        return None

    @property
    def single_policy(self) -> bool:
        """Whether one policy must have sampled each whole response."""
        return False

    @property
    def spans(self) -> bool:
        """Whether it needs the `evidence` of the whole update before the first micro-batch."""
        return False

    def evidence(self, terms: Terms) -> Float[Tensor, "tokens"]:
        """Returns the values that `State.evidence` collects, `NO_EVIDENCE` for tokens without one. No gradient."""
        raise NotImplementedError

    def unbounded(self) -> Surrogate:
        """Returns the surrogate without its clip or bound."""
        return self

    def peers(self, level: str) -> Peers:  # noqa: ARG002
        """Returns the settings of the same term in other frameworks; one without an equivalent has no entry.

        `level` is that of the ratio.
        """
        return {}


@dataclass(frozen=True)
class Clipped(Surrogate):
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
            # For A < 0 only: at A >= 0 the floor dual * A would raise the value of every token.
            value = torch.where(advantage < 0, torch.maximum(value, self.dual * advantage), value)
            statistics |= terms.share("clip/dual", (advantage < 0) & (ratio > self.dual))
        return value, statistics

    def equation(self, ratio: str) -> str:
        clipped = f"min({ratio} A, clip({ratio}, {1 - self.low:g}, {1 + self.high:g}) A)"
        return clipped if self.dual is None else f"max[A<0]({clipped}, {self.dual:g} A)"

    def notes(self) -> tuple[str, ...]:
        if self.dual is None or self.dual > 1 + self.high:
            return ()
        return (f"note: clip_dual = {self.dual:g} lies inside the clip range, it acts before the upper clip could",)

    def unbounded(self) -> Surrogate:
        return Unclipped()

    def peers(self, level: str) -> Peers:
        if level in TURN_LEVELS:
            return {}
        trl: dict[str, str] = {}
        miles: dict[str, str] = {}
        verl = {"policy_loss": "{loss_mode: gspo}"} if level == "geometric" else {}
        if level != "sequence":
            verl |= {"clip_ratio_low": f"{self.low:g}", "clip_ratio_high": f"{self.high:g}"}
            trl = {"epsilon": repr(self.low), "epsilon_high": repr(self.high)}
            miles = {"--eps-clip": f"{self.low:g}", "--eps-clip-high": f"{self.high:g}"}
        if self.dual is not None:
            verl |= {"clip_ratio_c": f"{self.dual:g}"}
            trl |= {"delta": repr(self.dual)} if trl else {}
            miles |= {"--eps-clip-c": f"{self.dual:g}"} if miles else {}
        trl |= {"importance_sampling_level": '"sequence"'} if level == "geometric" else {}
        product = "the product of the response has no equivalent"
        lacks = {
            "verl": f"# verl clips π/π_old per token; {product}",
            "TRL": f"# TRL's sequence level is the geometric mean; {product}",
            "Miles": f"# Miles clips π/π_old per token; {product}",
        }
        return {
            name: Setting(options, (lacks[name],) if level == "sequence" else ())
            for name, options in (("verl", verl), ("TRL", trl), ("Miles", miles))
        }


@dataclass(frozen=True)
class Reinforce(Surrogate):
    """sg[min(r, ceiling)] A log pi: the ratio is a capped weight, every token keeps a gradient.

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

    def equation(self, ratio: str) -> str:
        return f"sg[min({ratio}, {self.ceiling:g})] A log π"

    def unbounded(self) -> Surrogate:
        return Unclipped()

    def peers(self, level: str) -> Peers:
        if level in TURN_LEVELS:
            return {}
        relative = {"clip_ratio_low": "1.0", "clip_ratio_high": f"{self.ceiling - 1:g}"}
        return {
            "verl": Setting({"policy_loss": "{loss_mode: cispo}", **relative}),
            "TRL": Setting({"loss_type": '"cispo"', "epsilon_high": repr(self.ceiling)}),
        }


@dataclass(frozen=True)
class Regression(Surrogate):
    """-(beta S - A)^2 for a sequence, S = sum_t (log pi - log mu): OAPL, arXiv 2602.19362 eq. 3.

    Needs the ratio at sequence level. Each token carries 1/T of the value and the gradient of its own log-prob, so
    that the sum over tokens is the square with its exact gradient.
    """

    beta: Number = 1e-3

    def __post_init__(self) -> None:
        if not self.beta > 0:
            raise TrimtabError(f"beta = {self.beta:g}: the regression target is scaled by it, use more than 0")

    def __call__(self, terms: Terms, state: State) -> Value:  # noqa: ARG002
        log = terms.log_ratio.detach()
        residual = self.beta * log - terms.advantage
        share = residual.square() / terms.sequences.spread(terms.sequences.lengths.clamp(min=1))
        value = share + 2.0 * self.beta * residual * (terms.log_ratio - log)
        return -value, {}

    def equation(self, ratio: str) -> str:
        return f"−({self.beta:g}·log {ratio} − A)²/T"

    def refusal(self, ratio: Ratio, aggregation: Aggregation, *, corrected: bool) -> str | None:  # noqa: ARG002
        if ratio.level != "sequence":
            return (
                f"Regression squares the log-ratio of a whole response, not one at {ratio.level} level: use "
                f'Ratio("sequence", "{ratio.over}")'
            )
        if aggregation.kind == "seq-mean-token-mean":
            return (
                "Regression divides a response's square by its length already: use aggregation "
                '"trained-mean-token-sum" or "seq-mean-token-sum"'
            )
        return None

    @property
    def single_policy(self) -> bool:
        return True


@dataclass(frozen=True)
class Shaped(Surrogate):
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

    def equation(self, ratio: str) -> str:
        return f"({ratio} A on-policy, π/(π + {self.gamma:g}) A off-policy)"

    @property
    def reads(self) -> frozenset[str]:
        return frozenset({"off_policy"})

    def refusal(self, ratio: Ratio, aggregation: Aggregation, *, corrected: bool) -> str | None:  # noqa: ARG002
        if not corrected:
            return None
        return "Shaped trains tokens without a behavior policy, which a weight or a mask would read: leave these out"


@dataclass(frozen=True)
class SecondMoment(Surrogate):
    """r A while the second moment of the log-ratios is within `tau`: M2PO (arXiv 2510.01161), in two forms.

    cap: over harmful tokens (A > 0, r > 1 or A < 0, r < 1); r is clipped at exp(+-c), where the cap c keeps their
        capped second moment at `tau` (the official code).
    mask: over all trained tokens; those with the largest |log r| are dropped until the mean square of the rest is at
        most `tau`, and nothing is clipped (the paper). Dropped tokens stay in the denominator.
    """

    tau: Number = 0.04
    form: str = "cap"

    def __post_init__(self) -> None:
        if not self.tau > 0:
            raise TrimtabError(f"tau = {self.tau:g}: the second moment allowed must be more than 0")
        if self.form not in SECOND_MOMENT_FORMS:
            raise TrimtabError(f"unknown form {self.form!r}{did_you_mean(self.form, SECOND_MOMENT_FORMS)}")

    @property
    def spans(self) -> bool:
        return True

    def evidence(self, terms: Terms) -> Float[Tensor, "tokens"]:
        """Returns |log-ratio| of the tokens in the second moment, negative for all others. No gradient."""
        log = terms.log_ratio.detach()
        counted = terms.on_policy
        if self.form == "cap":
            counted = (log * terms.advantage.sign() > 0) & (terms.advantage.abs() > HARM_FLOOR)
        return torch.where(counted, log.abs(), NO_EVIDENCE).reshape(-1)

    def __call__(self, terms: Terms, state: State) -> Value:
        return self._capped(terms, state) if self.form == "cap" else self._masked(terms, state)

    def _capped(self, terms: Terms, state: State) -> Value:
        cap, advantage = state.second_moment_cap(self.tau).to(terms.logp.dtype), terms.advantage
        # The log is clamped, not the ratio: a token exactly at the cap stays unclipped whatever the rounding of exp.
        clipped = bounded(terms.log_ratio.clamp(-cap, cap)).exp()
        value = torch.minimum(terms.ratio * advantage, clipped * advantage)
        log = terms.log_ratio.detach()
        statistics = {
            **terms.share("clip/low", (advantage < 0) & (log < -cap)),
            **terms.share("clip/high", (advantage > 0) & (log > cap)),
        }
        return value, statistics

    def _masked(self, terms: Terms, state: State) -> Value:
        limit = state.second_moment_limit(self.tau).to(terms.logp.dtype)
        outside = terms.log_ratio.detach().abs() > limit
        value = torch.where(outside, 0.0, terms.ratio * terms.advantage)
        return value, terms.share("clip/second_moment", outside)

    def equation(self, ratio: str) -> str:
        if self.form == "cap":
            return f"min({ratio} A, clip({ratio}, e^−c, e^c) A)"
        return f"1[|log {ratio}| ≤ c]·{ratio} A"

    def notes(self) -> tuple[str, ...]:
        if self.form == "cap":
            return (f"c: largest harmful |log r| whose capped second moment stays below {self.tau:g}; ∞ within it",)
        return (
            f"c: largest |log r| of the update up to which the mean of log² r is at most {self.tau:g}; "
            "what is beyond stays in D",
        )

    def unbounded(self) -> Surrogate:
        return Unclipped()


@dataclass(frozen=True)
class LogProb(Surrogate):
    """A log pi: the policy gradient without a ratio, as if on-policy (REINFORCE, Williams 1992)."""

    def __call__(self, terms: Terms, state: State) -> Value:  # noqa: ARG002
        return terms.advantage * terms.logp, {}

    def equation(self, ratio: str) -> str:  # noqa: ARG002
        return "A log π"

    def refusal(self, ratio: Ratio, aggregation: Aggregation, *, corrected: bool) -> str | None:  # noqa: ARG002
        return None if ratio == Ratio() else "LogProb has no ratio, so its level and policy have no effect: use Ratio()"


@dataclass(frozen=True)
class Unclipped(Surrogate):
    """r A: the plain importance-weighted policy gradient."""

    def __call__(self, terms: Terms, state: State) -> Value:  # noqa: ARG002
        return terms.ratio * terms.advantage, {}

    def equation(self, ratio: str) -> str:
        return f"{ratio} A"
