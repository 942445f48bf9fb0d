"""The KL term, to the reference policy, beside the policy term.

It is estimated from samples, with gradient through the current policy. d = log pi_ref - log pi:

    k1  -d                 gradient of the value: score function, mean 0 on-policy
    k2  d^2 / 2            its gradient is an estimate of grad KL(pi||pi_ref) on-policy
    k3  e^d - d - 1        GRPO's term; its gradient estimates grad KL(pi_ref||pi) on-policy
    unbiased  q (e^d - d - 1), q = pi/mu with gradient, mu the sampler's policy: grad = q log(pi/pi_ref) grad log pi,
              whose mean over the sampler's tokens is exactly grad KL(pi||pi_ref)  (DeepSeek-V3.2)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from trimtab.corrections import divergences
from trimtab.corrections.arguments import check_option, check_range
from trimtab.corrections.code_lines import Lines, exponential
from trimtab.corrections.ratios import Number, bounded

KL_KINDS = ("k1", "k2", "k3", "unbiased")


@dataclass(frozen=True)
class KL:
    """A KL estimator (one of `KL_KINDS`) and its coefficient; 0 disables the term."""

    kind: str = "k3"
    coef: Number = 0.0

    def __post_init__(self) -> None:
        check_option(self, "kind", KL_KINDS)
        check_range(self, "[0, inf)", "coef")

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
        estimate = divergences.code("k3" if self.kind == "unbiased" else self.kind, "reference", log, lines)
        if self.kind != "unbiased":
            return estimate
        own = (
            "torch.where(off_policy, current - current.detach(), log_w)" if lines.external else lines.log_of("current")
        )
        return f"{lines.define('q', exponential(own))} * {estimate}"
