"""Score centering: removes from the gradient the expected score under the sampler, which carries no signal."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from trimtab.corrections.ratios import Number
from trimtab.errors import TrimtabError

MASS_FLOOR = 1e-6
"""Smallest mass outside the head, of either policy."""


@dataclass(frozen=True)
class Centering:
    """Adds A C to the loss, C_t = sum_v sg[mu(v) f(pi(v)/mu(v)) - alpha pi(v)] log pi(v) over the sampler's head.

    Off-policy the expected score E_mu[f grad log pi] is not 0: it moves the policy in proportion to the mean advantage.
    C subtracts it in closed form; outside the head mu is taken as proportional to pi, which `alpha` accounts for. With
    the whole vocabulary as the head it is exact.

    ceiling: f(x) = min(x, ceiling), the weight of the sampled token; None: f = 1, for a loss without a ratio. Both
        must be the same function. Score centering, arXiv 2609.20807.
    """

    ceiling: Number | None = 2.0

    def __post_init__(self) -> None:
        if self.ceiling is not None and not 1 <= self.ceiling < float("inf"):
            raise TrimtabError(
                f"ceiling = {self.ceiling:g} of the centering bounds the ratio itself, use 1 or more; without a bound "
                "the exact weight leaves nothing to center"
            )

    def __call__(
        self, head_current: Float[Tensor, "batch time head"], head_behavior: Float[Tensor, "batch time head"]
    ) -> Float[Tensor, "batch time"]:
        """Returns C of each position, with gradient by `head_current`."""
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
