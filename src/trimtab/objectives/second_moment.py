"""M2PO: a bound on the second moment of the log-ratios of the whole update."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from trimtab.corrections.ratios import Number, bounded
from trimtab.errors import TrimtabError, did_you_mean
from trimtab.objectives.state import NOT_COUNTED, State
from trimtab.objectives.surrogate import Surrogate, Terms, Value
from trimtab.objectives.surrogates import Unclipped

HARM_FLOOR = 1e-12
"""Smallest |advantage| for which a token can count as harmful (M2PO's official code)."""

SECOND_MOMENT_FORMS = ("cap", "mask")


@dataclass(frozen=True)
class SecondMoment(Surrogate):
    """r A while the second moment of the log-ratios is within `tau`: M2PO (arXiv 2510.01161), in two forms.

    cap: over harmful tokens (A > 0, r > 1 or A < 0, r < 1); r is clipped at exp(+-c), where the cap c keeps their
        capped second moment at `tau` (the official code).
    mask: over all trained tokens; those with the largest |log r| are dropped until the mean square of the rest is at
        most `tau`, and nothing is clipped (the paper). Dropped tokens stay in the denominator.
    """

    collects = True
    tau: Number = 0.04
    form: str = "cap"

    def __post_init__(self) -> None:
        if not 0 < self.tau < math.inf:
            raise TrimtabError(f"tau = {self.tau:g}: the second moment allowed must be finite and above 0")
        if self.form not in SECOND_MOMENT_FORMS:
            raise TrimtabError(f"unknown form {self.form!r}{did_you_mean(self.form, SECOND_MOMENT_FORMS)}")

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

    def notes(self) -> tuple[str, ...]:
        if self.form == "cap":
            return (f"c: largest harmful |log r| whose capped second moment stays below {self.tau:g}; ∞ within it",)
        return (
            f"c: largest |log r| of the update up to which the mean of log² r is at most {self.tau:g}; "
            "what is beyond stays in D",
        )

    def unbounded(self) -> Surrogate:
        return Unclipped()
