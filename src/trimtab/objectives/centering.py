"""Score centering: removes from the gradient the expected score under the sampler, which carries no signal.

Off-policy the expected score E_mu[f grad log pi] is not 0: it moves the policy in proportion to the mean advantage.
With centering A C is added to the loss, which subtracts it in closed form:

    C_t = sum_v sg[mu(v) f(pi(v)/mu(v)) - alpha pi(v)] log pi(v)      over the sampler's most probable ids, the head

Outside the head mu is taken as proportional to pi, which alpha accounts for; with the whole vocabulary as the head it
is exact. f is the weight of the sampled token's score: 1, or min(x, ceiling). Score centering, arXiv 2609.20807.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from trimtab.corrections.ratios import Number
from trimtab.errors import TrimtabError
from trimtab.objectives.policies import Ratio
from trimtab.objectives.surrogate import Surrogate
from trimtab.objectives.surrogates import LogProb, Reinforce

MASS_FLOOR = 1e-6
"""Smallest mass outside the head, of either policy."""


def centering_term(
    head_current: Float[Tensor, "batch time head"],
    head_behavior: Float[Tensor, "batch time head"],
    ceiling: Number | None,
) -> Float[Tensor, "batch time"]:
    """Returns C of each position, with gradient by `head_current`.

    The heads are log-probs of the same ids. ceiling: f(x) = min(x, ceiling); None for f = 1.
    """
    with torch.no_grad():
        p, q = head_current.exp(), head_behavior.exp()
        rest_p, rest_q = ((1 - mass.sum(-1, keepdim=True)).clamp(min=MASS_FLOOR) for mass in (p, q))
        tail = rest_q / rest_p
        if ceiling is None:
            coefficient = q - tail * p
        else:
            # q f(p/q) and tail f(1/tail) without a division.
            coefficient = torch.minimum(p, ceiling * q) - (ceiling * tail).clamp(max=1) * p
    return (coefficient * torch.where(coefficient == 0, 0.0, head_current)).sum(-1)


def centering_ceiling(ratio: Ratio, surrogate: Surrogate, *, corrected: bool) -> Number | None:
    """Returns the ceiling of f for the score weight of an objective of these parts, None for f = 1.

    corrected: there is a weight or a mask. Raises `TrimtabError` where the score of a token has another weight: what is
    subtracted would not be its expectation, and would move the policy by itself.
    """
    if not corrected and type(surrogate) is LogProb:
        return None
    if not corrected and type(surrogate) is Reinforce and ratio == Ratio("token", "behavior"):
        if surrogate.ceiling < math.inf:
            return surrogate.ceiling
        raise TrimtabError("centering has no effect on exact weights, whose expected score is 0: give a finite ceiling")
    raise TrimtabError(
        "centering subtracts the expectation of a score that has the weight 1 or min(π/μ, ceiling): use the surrogate "
        '"log-prob", or "reinforce" with ratio = {level = "token", over = "behavior"}, without a weight or a mask'
    )


def centering_equation(ceiling: Number | None) -> str:
    """Returns what C is, as text with its numbers."""
    weight = "μ(v)" if ceiling is None else f"min(π(v), {ceiling:g} μ(v))"
    return f"C = Σ_v sg[{weight} − α π(v)] log π(v) over the sampler's most probable v, α from the mass outside"
