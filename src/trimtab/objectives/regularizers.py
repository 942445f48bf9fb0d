"""The terms beside the policy term: KL to the reference policy, and score centering.

KL is estimated from samples, with gradient through the current policy. d = log pi_ref - log pi:

    k1  -d                 gradient of the value: score function, mean 0 on-policy
    k2  d^2 / 2            its gradient is an estimate of grad KL(pi||pi_ref) on-policy
    k3  e^d - d - 1        GRPO's term; its gradient estimates grad KL(pi_ref||pi) on-policy
    unbiased  q (e^d - d - 1), q = pi/mu with gradient, mu the sampler's policy: grad = q log(pi/pi_ref) grad log pi,
              whose mean over the sampler's tokens is exactly grad KL(pi||pi_ref)  (DeepSeek-V3.2)

Score centering (arXiv 2609.20807) removes the expected score under the sampler, which carries no signal.
Off-policy the expected score E_mu[f grad log pi] is not 0: it moves the policy in proportion to the mean advantage.
Centering adds A C to the loss, which subtracts the expected score in closed form:

    C_t = sum_v sg[mu(v) f(pi(v)/mu(v)) - alpha pi(v)] log pi(v)      over the sampler's most probable ids, the head

Outside the head, mu is assumed proportional to pi, which gives alpha. C is exact if the head is the whole vocabulary.
f(x) is the weight of the sampled token's score: 1, or min(x, ceiling).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from trimtab.corrections import divergences
from trimtab.corrections.code_lines import Lines, clamped
from trimtab.corrections.fields import CheckedFields, one_of, within
from trimtab.corrections.ratios import Number, bounded
from trimtab.errors import TrimtabError
from trimtab.objectives.ratio import Ratio
from trimtab.objectives.surrogates import LogProb, Reinforce, Surrogate

KL_KINDS = ("k1", "k2", "k3", "unbiased")
MASS_FLOOR = 1e-6
"""Lower bound on the total probability of the ids outside the head, for either policy."""


@dataclass(frozen=True)
class KL(CheckedFields):
    """A KL estimator (one of `KL_KINDS`) and its coefficient; 0 disables the term."""

    kind: str = one_of(KL_KINDS, "k3")
    coef: Number = within("[0, inf)", 0.0)

    @property
    def needs(self) -> frozenset[str]:
        """Fields of `PolicyLogps` read besides `current`."""
        if self.coef == 0:
            return frozenset()
        return frozenset({"reference", "behavior"} if self.kind == "unbiased" else {"reference"})

    def per_token(
        self, to_reference: Float[Tensor, "batch time"], to_sampler: Float[Tensor, "batch time"] | None
    ) -> Float[Tensor, "batch time"]:
        """Returns the estimate at each token. `to_reference` is d, `to_sampler` is log q, both with gradient."""
        if self.kind != "unbiased":
            return divergences.estimate(self.kind, to_reference)
        assert to_sampler is not None
        return torch.exp(bounded(to_sampler)) * divergences.k3(to_reference)

    def equation(self, *, external: bool) -> str:
        """Returns the term of a token as text; `external`: whether there may be tokens without a behavior policy."""
        k3 = "π_ref/π − log(π_ref/π) − 1"
        ratio = "π/μ (1 at off-policy tokens, which have no μ)" if external else "π/μ"
        return {
            "k1": "log(π/π_ref), whose gradient averages to 0 on-policy: a monitor",
            "k2": "½ log²(π_ref/π)",
            "k3": k3,
            "unbiased": f"{ratio}·({k3}), gradient through both",
        }[self.kind]

    def code(self, lines: Lines) -> str:
        """Returns the term of a token as PyTorch code."""
        log = lines.define("log_reference", "reference - current")
        if self.kind != "unbiased":
            return divergences.code(self.kind, "reference", log, lines)
        q = lines.define("q", f"{clamped(lines.log_of('current'))}.exp()")
        return f"{q} * {divergences.code('k3', 'reference', log, lines)}"


@dataclass(frozen=True)
class Centering:
    """The term C of each token. ceiling: f(x) = min(x, ceiling); None for f = 1."""

    ceiling: Number | None

    @classmethod
    def of(cls, ratio: Ratio, surrogate: Surrogate, *, corrected: bool) -> Centering:
        """Returns the centering term of an objective with these parts.

        corrected: whether there is a weight or a mask. Raises `TrimtabError` if the score of a token has another weight
        than f: the term would then not be the expected score, and would move the policy by itself.
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
        expected = "mu - tail * pi"
        if self.ceiling is not None:
            expected = f"torch.minimum(pi, {self.ceiling} * mu) - ({self.ceiling} * tail).clamp(max=1) * pi"
        return lines.write(f"""
            pi = head_current.detach().exp()
            mu = head_behavior.exp()
            rest_pi = (1 - pi.sum(-1, keepdim=True)).clamp(min={MASS_FLOOR})
            rest_mu = (1 - mu.sum(-1, keepdim=True)).clamp(min={MASS_FLOOR})
            tail = rest_mu / rest_pi  # mu / pi of all other ids
            expected = {expected}
            center = (expected * torch.where(expected == 0, 0.0, head_current)).sum(-1)
            center
            """)
