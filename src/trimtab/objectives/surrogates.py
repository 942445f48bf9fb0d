"""Surrogates that clip or cap the ratio, that leave it alone, and the regression of OAPL."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from trimtab.corrections.protocols import Peers, Setting
from trimtab.corrections.ratios import Number
from trimtab.errors import TrimtabError
from trimtab.objectives.aggregation import Aggregation
from trimtab.objectives.policies import Ratio
from trimtab.objectives.state import State
from trimtab.objectives.surrogate import Surrogate, Terms, Value


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
            raise TrimtabError(f"low = {self.low:g}: the bound is 1 - low, use a value in [0, 1]")
        if not self.high >= 0:
            raise TrimtabError(f"high = {self.high:g}: the bound is 1 + high, use 0 or more")
        if self.dual is not None and not self.dual > 1:
            raise TrimtabError(f"dual = {self.dual:g}: it bounds the ratio from above, use more than 1")

    def __call__(self, terms: Terms, state: State) -> Value:
        ratio, advantage = terms.ratio, terms.advantage
        low, high = 1.0 - self.low, 1.0 + self.high
        value = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
        below, above = (advantage < 0) & (ratio < low), (advantage > 0) & (ratio > high)
        statistics = {
            **terms.share("clip/low", below),
            **terms.share("clip/high", above),
            **terms.share_by_tenth("clip/tenth", below | above),
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
        return (f"note: the dual clip at {self.dual:g} is inside the clip range, it acts before the upper clip could",)

    def unbounded(self) -> Surrogate:
        return Unclipped()

    def peers(self, level: str) -> Peers:
        if level not in ("token", "geometric"):  # None clips the product of a response.
            return {}
        bounds = {"clip_ratio_low": f"{self.low:g}", "clip_ratio_high": f"{self.high:g}"}
        # verl always has a dual clip; 1e9 lies above the largest ratio.
        verl = {**bounds, "clip_ratio_c": "1e9" if self.dual is None else f"{self.dual:g}"}
        trl = {"epsilon": repr(self.low), "epsilon_high": repr(self.high)}
        miles = {"--eps-clip": f"{self.low:g}", "--eps-clip-high": f"{self.high:g}"}
        remarks: tuple[str, ...] = ()
        if level == "geometric":
            verl, trl = {"loss_mode": "gspo", **bounds}, {**trl, "importance_sampling_level": '"sequence"'}
            remarks = () if self.dual is None else ("# differs: verl's gspo has no dual clip",)
        outside: tuple[str, ...] = ()
        if self.dual is not None:
            trl |= {"delta": repr(self.dual)}
            miles |= {"--eps-clip-c": f"{self.dual:g}"}
            outside = ("# differs: TRL's delta caps the ratio where A > 0 too",) if self.dual < 1 + self.high else ()
        return {"verl": Setting(verl, remarks), "TRL": Setting(trl, outside), "Miles": Setting(miles)}


@dataclass(frozen=True)
class Reinforce(Surrogate):
    """sg[min(r, ceiling)] A log pi: the ratio is a capped weight, every token keeps a gradient.

    CISPO (arXiv 2506.13585) with an absolute ceiling and no floor (ScaleRL, arXiv 2510.13786); `inf` for no ceiling.
    """

    ceiling: Number = 5.0

    def __post_init__(self) -> None:
        if not self.ceiling >= 1:
            raise TrimtabError(f"ceiling = {self.ceiling:g} bounds the ratio itself, use 1 or more")

    def __call__(self, terms: Terms, state: State) -> Value:
        ratio = terms.ratio.detach()
        value = ratio.clamp(max=self.ceiling) * terms.advantage * terms.logp
        return value, terms.share("clip/high", ratio > self.ceiling)

    def equation(self, ratio: str) -> str:
        weight = ratio if self.ceiling == math.inf else f"min({ratio}, {self.ceiling:g})"
        return f"sg[{weight}] A log π"

    def unbounded(self) -> Surrogate:
        return Unclipped()

    def peers(self, level: str) -> Peers:
        if level != "token":
            return {}
        ceiling = min(self.ceiling, 1e9)  # above the largest ratio
        relative = {"clip_ratio_low": "1.0", "clip_ratio_high": f"{ceiling - 1:.10g}"}
        return {
            "verl": Setting({"loss_mode": "cispo", **relative}),
            "TRL": Setting({"loss_type": '"cispo"', "epsilon_high": repr(ceiling)}),
        }


@dataclass(frozen=True)
class Regression(Surrogate):
    """-(beta S - A)^2 for a sequence, S = sum_t (log pi - log mu): OAPL, arXiv 2602.19362 eq. 3.

    Needs the ratio at sequence level. Each token carries 1/T of the value and the gradient of that token's log-prob, so
    that the sum over tokens is the square with its exact gradient.
    """

    per_response = True
    single_policy = True
    beta: Number = 1e-3

    def __post_init__(self) -> None:
        if not 0 < self.beta < math.inf:
            raise TrimtabError(f"beta = {self.beta:g}: the regression target is scaled by it, use a finite number > 0")

    def __call__(self, terms: Terms, state: State) -> Value:
        log = terms.log_ratio.detach()
        residual = self.beta * log - terms.advantage
        share = residual.square() / terms.sequences.spread(terms.sequences.lengths.clamp(min=1))
        value = share + 2.0 * self.beta * residual * (terms.log_ratio - log)
        return -value, {}

    def equation(self, ratio: str) -> str:
        return f"−({self.beta:g}·log {ratio} − A)²/T"

    def refusal(self, ratio: Ratio, aggregation: Aggregation, *, corrected: bool) -> str | None:
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


@dataclass(frozen=True)
class Shaped(Surrogate):
    """On-policy tokens r A, unclipped; external tokens f(pi) A with f(x) = x / (x + gamma).

    LUFFY (arXiv 2504.14945): the behavior probability of an external token is taken as 1.
    """

    reads = frozenset({"off_policy"})
    gamma: Number = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.gamma < math.inf:
            raise TrimtabError(f"gamma = {self.gamma:g}: f(x) = x / (x + gamma) needs a finite number > 0")

    def __call__(self, terms: Terms, state: State) -> Value:
        # pi / (pi + gamma) = sigmoid(log pi - log gamma), which cannot overflow.
        shaped = torch.sigmoid(terms.logp - math.log(self.gamma))
        factor = torch.where(terms.on_policy, terms.ratio, shaped)
        return factor * terms.advantage, terms.share("off_policy/tokens", ~terms.on_policy)

    def equation(self, ratio: str) -> str:
        return f"({ratio} A on-policy, π/(π + {self.gamma:g}) A off-policy)"

    def refusal(self, ratio: Ratio, aggregation: Aggregation, *, corrected: bool) -> str | None:
        if not corrected:
            return None
        return "Shaped trains tokens without a behavior policy, which a weight or a mask would read: leave these out"


@dataclass(frozen=True)
class LogProb(Surrogate):
    """A log pi: the policy gradient without a ratio, as if on-policy (REINFORCE, Williams 1992).

    Its metrics still measure current/proximal (`ratio/`, `update/kl`), which shows how far updates move the policy.
    """

    def __call__(self, terms: Terms, state: State) -> Value:
        return terms.advantage * terms.logp, {}

    def equation(self, ratio: str) -> str:
        return "A log π"

    def peers(self, level: str) -> Peers:
        return {"verl": Setting({"loss_mode": "gpg"})}

    def refusal(self, ratio: Ratio, aggregation: Aggregation, *, corrected: bool) -> str | None:
        return None if ratio == Ratio() else "LogProb has no ratio, so its level and policy have no effect: use Ratio()"


@dataclass(frozen=True)
class Unclipped(Surrogate):
    """r A: the plain importance-weighted policy gradient."""

    def __call__(self, terms: Terms, state: State) -> Value:
        return terms.ratio * terms.advantage, {}

    def equation(self, ratio: str) -> str:
        return f"{ratio} A"
