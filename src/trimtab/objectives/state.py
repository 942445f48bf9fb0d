"""Statistics summed over the parts of an update: `State`, which the loss needs, and `Metrics`, which it returns.

`State` has denominators, the mean weight, and the log-ratios of M2PO's second moment. `Objective.prepare` computes them
for each part of the update, without gradient; `+` adds the parts. Every micro-batch then uses the same state, so that
any split of the update gives the same loss and gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from trimtab.corrections.ratios import Number
from trimtab.corrections.statistics import Mergeable

NOT_COUNTED = -1.0
"""Value in `State.magnitudes` of tokens that do not count; a |log-ratio| is never negative."""


def _all_gather(values: Float[Tensor, "local"], group: dist.ProcessGroup | None) -> Float[Tensor, "all"]:
    """Returns the magnitudes of all ranks, concatenated; shorter parts are padded with `NOT_COUNTED`."""
    size = torch.tensor([values.numel()], device=values.device)
    dist.all_reduce(size, op=dist.ReduceOp.MAX, group=group)
    padded = torch.nn.functional.pad(values, (0, int(size) - values.numel()), value=NOT_COUNTED)
    parts = [torch.empty_like(padded) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, padded, group=group)
    return torch.cat(parts)


@dataclass(frozen=True, eq=False)
class State(Mergeable):
    """Statistics of one update or of a part of it; `+` adds parts. Counts are float64 scalars.

    `Objective.prepare` applies the masks only with `denominator="kept"`.
    """

    tokens: Tensor  # trained tokens, by the original mask
    sequences: Tensor  # all sequences, including those without a trained token
    sequences_trained: Tensor  # sequences with a trained token, by the original mask
    tokens_kept: Tensor  # tokens that no rule rejected
    sequences_rejected: Tensor  # sequences whose trained tokens were all rejected
    weight_total: Tensor  # divided by `weight_count`: the mean bounded weight
    weight_count: Tensor
    # (n,) |log-ratio| of the tokens in M2PO's second moment, negative for all others.
    magnitudes: Float[Tensor, "tokens"] = field(metadata={"merge": lambda left, right: torch.cat([left, right])})

    def __radd__(self, other: int) -> State:
        """Supports `sum`, which starts with 0."""
        if other != 0:
            return NotImplemented
        return self

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors by name. `+` concatenates `magnitudes` and adds all others."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    def all_reduce(self, group: dist.ProcessGroup | None = None) -> State:
        """Returns the state of the whole update, summed over data-parallel ranks. All ranks must call it."""
        named = self.tensors()
        magnitudes = _all_gather(named.pop("magnitudes"), group)
        sums = torch.stack(list(named.values()))
        dist.all_reduce(sums, group=group)
        return replace(self, **dict(zip(named, sums.unbind(), strict=True)), magnitudes=magnitudes)

    @cached_property
    def _sorted_magnitudes(self) -> tuple[Tensor, Tensor, Tensor]:
        """The magnitudes in ascending order, their squares (0 for `NOT_COUNTED`) and their cumulative sum."""
        values = self.magnitudes.double().sort().values
        squares = values.clamp(min=0).square()
        return values, squares, squares.cumsum(0)

    def second_moment_cap(self, tau: Number) -> Tensor:
        """Returns M2PO's cap on |log-ratio|: the largest observed value whose capped second moment is below `tau`.

        Infinite if the mean square of the magnitudes is at most `tau`; 0 if even the smallest value gives more
        (arXiv 2510.01161, as in its official code).
        """
        if self.magnitudes.numel() == 0:
            return self.tokens.new_full((), torch.inf)
        values, squares, sums = self._sorted_magnitudes
        # With the cap at values[i], that value and all larger ones contribute squares[i].
        remaining = torch.arange(values.numel(), 0, -1, device=values.device)
        capped = sums - squares + remaining * squares
        allowed = tau * (values >= 0).sum().double()
        cap = torch.where(capped < allowed, values, 0.0).max()
        return torch.where(capped[-1] <= allowed, torch.inf, cap)

    def second_moment_limit(self, tau: Number) -> Tensor:
        """Returns M2PO's limit on |log-ratio|: the largest observed value up to which the mean square is at most `tau`.

        Negative if even the smallest value exceeds it, or if there is none (arXiv 2510.01161, masking form). Equal
        values are kept or dropped together, so that the result does not depend on the order of tokens.
        """
        if self.magnitudes.numel() == 0:
            return self.tokens.new_full((), NOT_COUNTED)
        values, _, sums = self._sorted_magnitudes
        counted = values >= 0
        last_of_equals = torch.cat([values[1:] > values[:-1], counted.new_ones(1)])
        within = last_of_equals & counted & (sums <= tau * counted.cumsum(0).double())
        return torch.where(within, values, NOT_COUNTED).max()


@dataclass(frozen=True, eq=False)
class Metrics:
    """Statistics by the prefix of their metric keys. `+` merges the metrics of two parts of a batch."""

    parts: Mapping[str, Mergeable]

    def __add__(self, other: Metrics) -> Metrics:
        shared = self.parts.keys() & other.parts.keys()
        return Metrics({**self.parts, **other.parts, **{name: self.parts[name] + other.parts[name] for name in shared}})

    def finalize(self) -> dict[str, float]:
        """Returns the metrics as floats, in one transfer from the device. A mean over nothing is NaN."""
        named = {
            prefix + suffix: value.to(torch.float64)
            for prefix, part in self.parts.items()
            for suffix, value in part.summary().items()
        }
        return dict(zip(named, torch.stack(list(named.values())).tolist(), strict=True)) if named else {}
