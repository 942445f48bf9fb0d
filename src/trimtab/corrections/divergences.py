"""Per-token divergence estimates from log-ratios l = log p - log q.

For tokens drawn from q (http://joschu.net/blog/kl-approx.html):

    k1 = -l                 unbiased for KL(q||p), either sign
    k2 = l^2 / 2            biased, symmetric under rho -> 1/rho
    k3 = rho - 1 - l        unbiased for KL(q||p), never negative
    tv = |rho - 1|          twice an unbiased estimate of the total variation
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from trimtab.corrections.ratios import Ratios, bounded

DIVERGENCES = ("k1", "k2", "k3", "tv")


def k1(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    return -log_ratio


def k2(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    return 0.5 * log_ratio.square()


def k3(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    # rho - 1 computed from rho loses all digits where rho is close to 1; expm1 does not.
    return torch.expm1(bounded(log_ratio)) - log_ratio


def per_token(kind: str, ratios: Ratios) -> Float[Tensor, "batch time"]:
    """Returns a divergence at every token, 0 where the mask is False."""
    if kind == "k1":
        return k1(ratios.log)
    if kind == "k2":
        return k2(ratios.log)
    return ratios.excess - ratios.log if kind == "k3" else ratios.excess.abs()
