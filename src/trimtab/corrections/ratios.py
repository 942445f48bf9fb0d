"""Ratios of two policies at token, sequence and geometric level.

    token       rho_t   = exp(l_t),              l_t = log numerator - log denominator
    sequence    rho     = exp(sum_t m_t l_t)                  (the product)
    geometric   rho     = exp(sum_t m_t l_t / T)              (length-normalised, GSPO)

Everything is computed in float32 (float64 stays) and selected by the mask before `exp`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from trimtab.corrections.reduce import Sequences, select, widen

LEVELS = ("token", "sequence", "geometric")

Number = float | int
"""A bound or coefficient; a recipe may write 2 for 2.0."""

LOG_RATIO_BOUND = 20.0
"""Safety bound on an exponent (ratio 2e-9 .. 5e8). Its users report how often it applied."""


def log_ratio(
    numerator: Float[Tensor, "batch time"],
    denominator: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"],
) -> Float[Tensor, "batch time"]:
    """log numerator - log denominator at trained tokens, 0 elsewhere. Gradient through whatever carries it."""
    return select(widen(numerator) - widen(denominator), mask)


def at_level(log_ratio: Float[Tensor, "batch time"], sequences: Sequences, level: str) -> Float[Tensor, "batch time"]:
    """The log-ratio of a level at every token, with the gradient of that token's own log-prob.

    The value at sequence and geometric level is the sequence's; the gradient is that of `l_t` (the GSPO-token form,
    arXiv 2507.18071), so that clipping acts on the whole sequence while every token keeps its own gradient.
    """
    if level == "token":
        return log_ratio
    own = log_ratio.detach()
    reduce = sequences.sum if level == "sequence" else sequences.mean
    return sequences.spread(reduce(own)) + (log_ratio - own)


def bounded(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The exponent inside its safety bound; no gradient flows where it fires."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def beyond_bound(log_ratio: Float[Tensor, "*shape"]) -> Bool[Tensor, "*shape"]:
    """Where the safety bound fires."""
    return log_ratio.detach().abs() > LOG_RATIO_BOUND


@dataclass(frozen=True, eq=False)
class Ratios:
    """One pair of policies without gradient, each level computed once. `log` is 0 where the mask is False.

    `buffer`, if given, takes the token ratios.
    """

    log: Float[Tensor, "batch time"]
    sequences: Sequences
    buffer: Float[Tensor, "batch time"] | None = None

    @cached_property
    def excess(self) -> Float[Tensor, "batch time"]:
        """rho_t - 1 inside the safety bound; `expm1` keeps its digits where rho is close to 1."""
        return torch.clamp(self.log, -LOG_RATIO_BOUND, LOG_RATIO_BOUND, out=self.buffer).expm1_()

    @cached_property
    def log_sequence(self) -> Float[Tensor, "sequences 1"]:
        return self.sequences.sum(self.log)

    @cached_property
    def log_geometric(self) -> Float[Tensor, "sequences 1"]:
        return self.log_sequence / self.sequences.lengths.clamp(min=1)

    def log_at(self, level: str) -> Tensor:
        """Log-ratio (batch, time) at token level, (sequences, 1) otherwise."""
        if level == "token":
            return self.log
        return self.log_sequence if level == "sequence" else self.log_geometric

    def at(self, level: str, out: Tensor | None = None) -> Tensor:
        """Ratio (batch, time) at token level, (sequences, 1) otherwise, as a tensor of its own or in `out`."""
        if level == "token":
            # Not excess + 1, which leaves a ratio of 1e-5 three digits: it weighs a token that may be 1e5 at current.
            return torch.clamp(self.log, -LOG_RATIO_BOUND, LOG_RATIO_BOUND, out=out).exp_()
        return bounded(self.log_at(level)).exp()
