"""Ratios of two policies for each token, or for a unit of tokens: a sequence, a model turn or a prefix.

    token       rho_t   = exp(l_t),              l_t = log numerator - log denominator
    sequence    rho     = exp(sum_t m_t l_t)                  (the product)
    geometric   rho     = exp(sum_t m_t l_t / T)              (length-normalized, GSPO)
    turn, turn_geometric      the product and the geometric mean over one model turn instead of the sequence
    prefix, prefix_geometric  the same over the sequence up to and including the token

All values are computed in float32 (float64 stays float64) and selected by the mask before `exp`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from trimtab.corrections.reduce import Sequences, select, widen

LEVELS = ("token", "sequence", "geometric", "turn", "turn_geometric", "prefix", "prefix_geometric")
TURN_LEVELS = ("turn", "turn_geometric")
PREFIX_LEVELS = ("prefix", "prefix_geometric")
PER_TOKEN_LEVELS = ("token", *PREFIX_LEVELS)
"""Levels whose ratio is defined for each token."""
PRODUCT_LEVELS = ("sequence", "turn")
"""Levels that multiply the ratios of a unit's tokens."""

OVER = {"proximal": ("ρ", "π_old"), "current": ("w", "π")}
"""Numerators of the ratios to the sampler in weights and rules: the letter of the ratio, and the policy's symbol."""

Number = float | int
"""A bound or coefficient; a recipe may contain 2 for 2.0."""

LOG_RATIO_BOUND = 20.0
"""Safety bound on an exponent (ratio 2e-9 .. 5e8). Metrics report how often it applied."""


def log_ratio(
    numerator: Float[Tensor, "batch time"],
    denominator: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"],
) -> Float[Tensor, "batch time"]:
    """Returns log numerator - log denominator at trained tokens and 0 elsewhere. Differentiable in both."""
    return select(widen(numerator) - widen(denominator), mask)


def at_level(log_ratio: Float[Tensor, "batch time"], sequences: Sequences, level: str) -> Float[Tensor, "batch time"]:
    """Returns the log-ratio of a level at every token, with the gradient of that token's own log-prob.

    Above token level, the value belongs to the sequence, turn or prefix, and the gradient to l_t (the GSPO-token form,
    arXiv 2507.18071): clipping acts on the whole unit while every token keeps its own gradient.
    """
    if level == "token":
        return log_ratio
    own = log_ratio.detach()
    value = Ratios(own, sequences).log_at(level)
    return (value if level in PREFIX_LEVELS else units_of(sequences, level).spread(value)) + (log_ratio - own)


def units_of(sequences: Sequences, level: str) -> Sequences:
    """Returns the units that have one ratio each at this level: turns at turn levels, otherwise sequences."""
    return sequences.turns if level in TURN_LEVELS else sequences


def bounded(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Clamps an exponent to the safety bound; the gradient is 0 beyond it."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def ratio_excess(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Returns rho - 1 with a bounded exponent. `expm1` keeps the digits that rho - 1 loses for rho close to 1."""
    return torch.expm1(bounded(log_ratio))


def beyond_bound(log_ratio: Float[Tensor, "*shape"]) -> Bool[Tensor, "*shape"]:
    """Returns True where the safety bound applies."""
    return log_ratio.detach().abs() > LOG_RATIO_BOUND


@dataclass(frozen=True, eq=False)
class Ratios:
    """The ratios of a pair of policies, without gradient, each level computed once.

    log: (batch, time) log-ratio, 0 where the mask is False.
    """

    log: Float[Tensor, "batch time"]
    sequences: Sequences

    @cached_property
    def excess(self) -> Float[Tensor, "batch time"]:
        """rho_t - 1, as in `ratio_excess`."""
        return ratio_excess(self.log)

    @cached_property
    def log_sequence(self) -> Float[Tensor, "sequences 1"]:
        return self.sequences.sum(self.log)

    @cached_property
    def log_geometric(self) -> Float[Tensor, "sequences 1"]:
        return self.log_sequence / self.sequences.lengths.clamp(min=1)

    def log_at(self, level: str) -> Tensor:
        """Returns the log-ratio: (batch, time) at token and prefix levels, else (sequences, 1) or (turns, 1)."""
        if level == "token":
            return self.log
        if level in PREFIX_LEVELS:
            total = self.sequences.prefix_sum(self.log)
            if level == "prefix_geometric":
                total = total / self.sequences.positions.clamp(min=1)
            return select(total, self.sequences.mask)
        if level in TURN_LEVELS:
            turns = self.sequences.turns
            return turns.sum(self.log) if level == "turn" else turns.mean(self.log)
        return self.log_sequence if level == "sequence" else self.log_geometric

    def at(self, level: str) -> Tensor:
        """Returns the ratio: (batch, time) at token and prefix levels, else (sequences, 1) or (turns, 1)."""
        # Not excess + 1, which has three digits for a ratio of 1e-5: current/proximal of that token may be 1e5.
        return bounded(self.log_at(level)).exp()


_FORMS = {
    "token": ("{}_t", "{}"),
    "sequence": ("{}", "Π_t {}"),
    "geometric": ("{}_geo", "(Π_t {})^(1/T)"),
    "turn": ("{}_turn", "Π_t {} over the tokens of the turn"),
    "turn_geometric": ("{}_geo(turn)", "(Π_t {})^(1/n) over the n tokens of the turn"),
    "prefix": ("{}_≤t", "Π_t {} over the tokens up to this one"),
    "prefix_geometric": ("{}_geo(≤t)", "(Π_t {})^(1/n) over the n tokens up to this one"),
}
"""The symbol of a ratio at each level, and its formula from the ratios of tokens."""


def symbol(letter: str, level: str) -> str:
    """Returns the symbol of a ratio at a level: ρ_t, ρ, ρ_geo, ρ_turn, ρ_geo(turn), ρ_≤t or ρ_geo(≤t)."""
    return _FORMS[level][0].format(letter)


def definition(letter: str, level: str, numerator: str, denominator: str) -> str:
    """Returns the definition of a ratio's symbol, such as `ρ_t = π_old(y_t)/μ(y_t)`."""
    return f"{symbol(letter, level)} = {_FORMS[level][1].format(f'{numerator}(y_t)/{denominator}(y_t)')}"
