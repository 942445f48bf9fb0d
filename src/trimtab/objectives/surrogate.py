"""The interface of surrogates: the per-token term that is maximized, as a function of log-ratio and advantage.

A surrogate reads selected tensors (0 where untrained) and a ratio whose exponent is bounded, so that all values are
finite and a token rejected later leaves no NaN in the gradient. A new one is a frozen dataclass that inherits from
`Surrogate`, in the package or in your file: docs/objectives.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from trimtab.corrections.protocols import Peers
from trimtab.corrections.ratios import Number, bounded
from trimtab.corrections.reduce import Sequences
from trimtab.corrections.statistics import Mean, MeanByTenth, Mergeable
from trimtab.errors import TrimtabError
from trimtab.objectives.aggregation import Aggregation
from trimtab.objectives.policies import Ratio
from trimtab.objectives.state import State


@dataclass(frozen=True, eq=False)
class Terms:
    """The inputs of a surrogate, all (batch, time) and 0 where the mask is False.

    log_ratio: at the objective's level, not bounded, with the gradient of each token's own log-prob.
    token_log_ratio: the same at token level.
    logp: log pi of the current policy, with gradient.
    on_policy: trained tokens that have a behavior policy; False at LUFFY's external tokens.
    behavior: log mu, where the surrogate reads it. age: as in `PolicyLogps`, where the surrogate reads it.
    """

    log_ratio: Float[Tensor, "batch time"]
    token_log_ratio: Float[Tensor, "batch time"]
    logp: Float[Tensor, "batch time"]
    advantage: Float[Tensor, "batch time"]
    mask: Bool[Tensor, "batch time"]
    on_policy: Bool[Tensor, "batch time"]
    sequences: Sequences
    behavior: Float[Tensor, "batch time"] | None = None
    age: Int[Tensor, "batch time"] | None = None

    @property
    def ratio(self) -> Float[Tensor, "batch time"]:
        """The ratio, its exponent bounded, with gradient."""
        return bounded(self.log_ratio).exp()

    def share(self, name: str, where: Tensor) -> dict[str, Mergeable]:
        """Returns the share of trained tokens at which `where`, bools (batch, time), holds, as a metric."""
        return {name: Mean.of(self._trained(name, where), self.mask)}

    def clipped(self, values: Tensor, low: Tensor | Number, high: Tensor | Number) -> dict[str, Mergeable]:
        """Returns the shares of trained tokens where a bound holds the update back: `low` at A < 0, `high` at A > 0."""
        below, above = (self.advantage < 0) & (values < low), (self.advantage > 0) & (values > high)
        return {**self.share("clip/low", below), **self.share("clip/high", above)}

    def share_by_tenth(self, name: str, where: Tensor) -> dict[str, Mergeable]:
        """Returns the share of trained tokens at which `where` holds in each tenth of the response, as a histogram."""
        return {name: MeanByTenth.of(self._trained(name, where), self.sequences)}

    def _trained(self, name: str, where: Tensor) -> Tensor:
        if where.dtype != torch.bool:
            raise TrimtabError(f"metric {name!r}: the share of tokens needs a mask of bools, not {where.dtype}")
        return where & self.mask


Value = tuple[Float[Tensor, "batch time"], dict[str, Mergeable]]


class Surrogate(ABC):
    """The base class of policy terms. A subclass is a frozen dataclass with `__call__` and `equation`.

    reads: fields of `PolicyLogps` read besides `current` and the ratio's denominator.
    per_response: whether all tokens of a response must have the same advantage.
    single_policy: whether one policy must have sampled each whole response.
    collects: whether it needs the `magnitudes` of the whole update before the first micro-batch.
    """

    reads: ClassVar[frozenset[str]] = frozenset()
    per_response: ClassVar[bool] = False
    single_policy: ClassVar[bool] = False
    collects: ClassVar[bool] = False

    @abstractmethod
    def __call__(self, terms: Terms, state: State) -> Value:
        """Returns the term of each token (to be maximized), and statistics such as clipped shares by metric key."""

    def checked(self, terms: Terms, state: State) -> Value:
        """Returns what `__call__` does. Raises `TrimtabError` where that is not a value for each token with metrics."""
        returned, name, shape = self(terms, state), type(self).__name__, tuple(terms.mask.shape)
        if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping)):
            raise TrimtabError(
                f"{name} returned {type(returned).__name__}, expected two: the value, and metrics or {{}}"
            )
        value, statistics = returned
        if not isinstance(value, Tensor) or tuple(value.shape) != shape or not value.is_floating_point():
            what = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise TrimtabError(f"{name} returned {what}, expected a number for each token: floats {shape}")
        if terms.log_ratio.requires_grad and not value.requires_grad and torch.is_grad_enabled():
            raise TrimtabError(f"{name} returned a value without gradient, which trains nothing: do not detach it")
        for key, metric in statistics.items():
            if not isinstance(metric, Mergeable):
                raise TrimtabError(f"{name}: metric {key!r} is {type(metric).__name__}, expected one of `terms.share`")
        return returned

    @abstractmethod
    def equation(self, ratio: str) -> str:
        """Returns the term as text with its numbers; `ratio` is the symbol of the ratio."""

    def notes(self) -> tuple[str, ...]:
        """Returns further lines of the equation: definitions of symbols and warnings."""
        return ()

    def refusal(self, ratio: Ratio, aggregation: Aggregation, *, corrected: bool) -> str | None:
        """Returns why it cannot be combined with these parts, or None. `corrected`: there is a weight or a mask."""
        return None

    def magnitudes(self, terms: Terms) -> Float[Tensor, "tokens"]:
        """Returns the |log-ratio| that `State.magnitudes` collects, `NOT_COUNTED` for other tokens. No gradient."""
        raise NotImplementedError

    def unbounded(self) -> Surrogate:
        """Returns the surrogate without its clip or bound."""
        return self

    def peers(self, level: str) -> Peers:
        """Returns the settings of the same term in other frameworks; one without an equivalent has no entry.

        `level` is that of the ratio.
        """
        return {}
