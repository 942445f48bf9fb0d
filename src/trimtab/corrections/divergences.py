"""Per-token divergence estimates from log-ratios l = log p - log q.

For tokens drawn from q (http://joschu.net/blog/kl-approx.html):

    k1 = -l                 unbiased for KL(q||p), either sign
    k2 = l^2 / 2            biased, symmetric under rho -> 1/rho
    k3 = rho - 1 - l        unbiased for KL(q||p), never negative
    tv = |rho - 1|          twice an unbiased estimate of the total variation

Two divergences read the probabilities p, q of the drawn token. They are lower bounds of the divergence over the
vocabulary (data processing inequality; DPPO, arXiv 2602.04879):

    binary_tv = |p - q|
    binary_kl = KL(Bernoulli(q) || Bernoulli(p))
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from trimtab.corrections.code_lines import Lines, clamped
from trimtab.corrections.ratios import LOG_RATIO_BOUND, Ratios, ratio_excess

DIVERGENCES = ("k1", "k2", "k3", "tv", "binary_tv", "binary_kl")

_REST_FLOOR = 1e-8
"""Smallest probability of all other tokens, in case log q rounds to 0."""


def estimate(kind: str, log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Returns k1, k2 or k3 of each log-ratio."""
    if kind == "k1":
        return -log_ratio
    return 0.5 * log_ratio.square() if kind == "k2" else k3(log_ratio)


def k3(log_ratio: Float[Tensor, "*shape"], excess: Float[Tensor, "*shape"] | None = None) -> Float[Tensor, "*shape"]:
    """Returns rho - 1 - l in nats, never negative. excess: rho - 1, if already computed.

    l is bounded above only, so that rho does not overflow: l = -25 gives 24; l = 25 gives the value at 20 (4.9e8),
    without gradient.
    """
    return (ratio_excess(log_ratio) if excess is None else excess) - log_ratio.clamp(max=LOG_RATIO_BOUND)


def probability_gap(log_q: Float[Tensor, "*shape"], log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Returns p - q from log q and log p - log q: max(p, q) * (1 - exp(-|log p/q|)), without cancellation."""
    larger = (log_q + log_ratio.clamp(min=0)).exp()
    return log_ratio.sign() * larger * -torch.expm1(-log_ratio.abs())


def binary_kl(log_q: Float[Tensor, "*shape"], log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Returns KL(Bernoulli(q) || Bernoulli(p)), never negative.

    The textbook form suffers from cancellation: in float32 it is negative for policies that differ by 1e-5 nats.
    """
    rest = (-torch.expm1(log_q)).clamp(min=_REST_FLOOR)
    relative = (-probability_gap(log_q, log_ratio) / rest).clamp(min=-1 + torch.finfo(log_ratio.dtype).eps)
    return (-log_q.exp() * log_ratio - rest * torch.log1p(relative)).clamp(min=0)


def per_token(kind: str, ratios: Ratios, log_q: Float[Tensor, "batch time"]) -> Float[Tensor, "batch time"]:
    """Returns a divergence at every token; `log_q` is the log-prob of the denominator. 0 where the mask is False."""
    if kind == "binary_tv":
        return probability_gap(log_q, ratios.log).abs()
    if kind == "binary_kl":
        return binary_kl(log_q, ratios.log)
    return ratios.excess.abs() if kind == "tv" else estimate(kind, ratios.log)


def code(kind: str, policy: str, log_ratio: str, lines: Lines) -> str:
    """Returns the name of a divergence at every token in printed code; log_ratio: the name of log policy/behavior."""
    excess = f"torch.expm1({clamped(log_ratio)})"
    expression = {
        "k1": f"-{log_ratio}",
        "k2": f"0.5 * {log_ratio}.square()",
        "k3": f"{excess} - {log_ratio}.clamp(max={LOG_RATIO_BOUND})",
        "tv": f"{excess}.abs()",
        "binary_tv": f"({policy}.exp() - behavior.exp()).abs()",
    }.get(kind)
    expression = expression or lines.write(f"""
        rise = torch.maximum({policy}, behavior).exp() * torch.expm1(-{log_ratio}.abs())
        gap = {log_ratio}.sign() * rise  # mu - pi, without cancellation
        rest = (-torch.expm1(behavior)).clamp(min={_REST_FLOOR})  # mu of all other tokens
        change = (gap / rest).clamp(min=-1 + torch.finfo(gap.dtype).eps)
        (-behavior.exp() * {log_ratio} - rest * torch.log1p(change)).clamp(min=0)
        """)
    return lines.define(kind, expression)
