"""Score centering: removes from the gradient the expected score under the sampler, which carries no signal.

Off-policy the expected score E_mu[f grad log pi] is not 0: it moves the policy in proportion to the mean advantage.
With centering A C is added to the loss, which subtracts it in closed form:

    C_t = sum_v sg[mu(v) f(pi(v)/mu(v)) - alpha pi(v)] log pi(v)      over the sampler's most probable ids, the head

Outside the head mu is taken as proportional to pi, which alpha accounts for; with the whole vocabulary as the head it
is exact. f is the weight of the sampled token's score: 1, or min(x, ceiling). Score centering, arXiv 2609.20807.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from trimtab.corrections.code_lines import Lines, number
from trimtab.corrections.ratios import Number
from trimtab.errors import TrimtabError
from trimtab.objectives.policies import Ratio
from trimtab.objectives.surrogates import LogProb, Reinforce, Surrogate

MASS_FLOOR = 1e-6
"""Smallest mass outside the head, of either policy."""


@dataclass(frozen=True)
class Centering:
    """The term C of each token. ceiling: f(x) = min(x, ceiling); None for f = 1."""

    ceiling: Number | None

    @classmethod
    def of(cls, ratio: Ratio, surrogate: Surrogate, *, corrected: bool) -> Centering:
        """Returns the term for the score weight of an objective of these parts.

        corrected: there is a weight or a mask. Raises `TrimtabError` where the score of a token has another weight:
        what is subtracted would not be its expectation, and would move the policy by itself.
        """
        if not corrected and type(surrogate) is LogProb:
            return cls(None)
        if not corrected and type(surrogate) is Reinforce and ratio == Ratio("token", "behavior"):
            if surrogate.ceiling < math.inf:
                return cls(surrogate.ceiling)
            raise TrimtabError(
                "centering has no effect on exact weights, whose expected score is 0: give a finite ceiling"
            )
        raise TrimtabError(
            "centering subtracts the expectation of a score that has the weight 1 or min(π/μ, ceiling): use the "
            'surrogate "log-prob", or "reinforce" with ratio = {level = "token", over = "behavior"}, without a weight '
            "or a mask"
        )

    def per_token(
        self, head_current: Float[Tensor, "batch time head"], head_behavior: Float[Tensor, "batch time head"]
    ) -> Float[Tensor, "batch time"]:
        """Returns C of each position, with gradient by `head_current`. The heads are log-probs of the same ids."""
        with torch.no_grad():
            p, q = head_current.exp(), head_behavior.exp()
            rest_p, rest_q = ((1 - mass.sum(-1, keepdim=True)).clamp(min=MASS_FLOOR) for mass in (p, q))
            tail = rest_q / rest_p
            if self.ceiling is None:
                coefficient = q - tail * p
            else:
                # q f(p/q) and tail f(1/tail) without a division.
                coefficient = torch.minimum(p, self.ceiling * q) - (self.ceiling * tail).clamp(max=1) * p
        return (coefficient * torch.where(coefficient == 0, 0.0, head_current)).sum(-1)

    def equation(self) -> str:
        """Returns what C is, as text with its numbers."""
        weight = "μ(v)" if self.ceiling is None else f"min(π(v), {self.ceiling:g} μ(v))"
        return f"C = Σ_v sg[{weight} − α π(v)] log π(v) over the sampler's most probable v, α from the mass outside"

    def code(self, lines: Lines) -> str:
        """Returns C of each token as PyTorch code."""
        head = "torch.where(mask[..., None], {}, -torch.inf).to(current.dtype)"
        log = lines.define("head_log_pi", head.format("head_current"))
        pi = lines.define("head_pi", f"{log}.detach().exp()")
        mu = lines.define("head_mu", f"{head.format('head_behavior.detach()')}.exp()")
        rest = f"(1 - {{}}.sum(-1, keepdim=True)).clamp(min={number(MASS_FLOOR)})"
        tail = lines.define("tail", f"{rest.format(mu)} / {rest.format(pi)}  # mu / pi of all other ids")
        score = f"{mu} - {tail} * {pi}"
        if self.ceiling is not None:
            cap = number(self.ceiling)
            score = f"torch.minimum({pi}, {cap} * {mu}) - ({cap} * {tail}).clamp(max=1) * {pi}"
        score = lines.define("expected", score)
        return lines.define("center", f"({score} * torch.where({score} == 0, 0.0, {log})).sum(-1)")
