"""Statistics over one whole optimizer update: denominators, the mean weight, M2PO's second moment.

Computed by `Objective.prepare` on each part of the update, without gradient, and added up; every micro-batch then uses
the same state, so that any split of the update gives the same loss and gradient.
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

NO_EVIDENCE = -1.0
"""Stands in `State.evidence` for tokens that are not judged: no |log-ratio| is negative."""


def _join(left: Tensor, right: Tensor) -> Tensor:
    return torch.cat([left, right])


def gathered(values: Float[Tensor, "mine"], group: dist.ProcessGroup | None) -> Float[Tensor, "all"]:
    """Every rank's evidence; the shorter ones are filled up with what counts as none."""
    size = torch.tensor([values.numel()], device=values.device)
    dist.all_reduce(size, op=dist.ReduceOp.MAX, group=group)
    padded = torch.nn.functional.pad(values, (0, int(size) - values.numel()), value=NO_EVIDENCE)
    parts = [torch.empty_like(padded) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, padded, group=group)
    return torch.cat(parts)


@dataclass(frozen=True, eq=False)
class State:
    """Counts are float64 scalars. `evidence` (n,) holds |log-ratio| of the tokens M2PO judges, negative elsewhere.

    tokens, sequences, sequences_trained: from the original mask (sequences include those without a trained token).
    tokens_kept, sequences_rejected: tokens no rule rejected; sequences that lost all their tokens to rules.
    weight_total / weight_count: the mean bounded weight.
    """

    tokens: Tensor
    sequences: Tensor
    sequences_trained: Tensor
    tokens_kept: Tensor
    sequences_rejected: Tensor
    weight_total: Tensor
    weight_count: Tensor
    evidence: Float[Tensor, "tokens"] = field(metadata={"merge": _join})

    def __add__(self, other: State) -> State:
        return State(
            **{
                part.name: part.metadata.get("merge", torch.add)(getattr(self, part.name), getattr(other, part.name))
                for part in fields(self)
            }
        )

    def __radd__(self, other: int) -> State:
        """Of `sum`, which begins with 0."""
        if other != 0:
            return NotImplemented
        return self

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name: all but `evidence` are sums, `evidence` is a collection."""
        return {part.name: getattr(self, part.name) for part in fields(self)}

    def replaced(self, tensors: Mapping[str, Tensor]) -> State:
        """The same state with some tensors exchanged, such as after a reduction over ranks."""
        return replace(self, **tensors)

    def all_reduce(self, group: dist.ProcessGroup | None = None) -> State:
        """The state of the whole update when every data-parallel rank holds a part. Waits for the other ranks."""
        named = self.tensors()
        evidence = gathered(named.pop("evidence"), group)
        sums = torch.stack(list(named.values()))
        dist.all_reduce(sums, group=group)
        return self.replaced({**dict(zip(named, sums.unbind(), strict=True)), "evidence": evidence})

    @cached_property
    def _ascending(self) -> tuple[Tensor, Tensor, Tensor]:
        """The evidence in ascending order, its squares, and their running sum; what is no evidence adds nothing."""
        values = self.evidence.double().sort().values
        squares = values.clamp(min=0).square()
        return values, squares, squares.cumsum(0)

    def second_moment_cap(self, tau: Number) -> Tensor:
        """M2PO's cap on |log-ratio|: the largest observed one whose capped second moment stays below `tau`.

        Infinite while the mean square over the evidence is at most `tau`; 0 when even the smallest is too much
        (arXiv 2510.01161, as in its official code).
        """
        if self.evidence.numel() == 0:
            return self.tokens.new_full((), torch.inf)
        values, squares, sums = self._ascending
        # With the cap at a value, it and all that follow count with its square.
        left = torch.arange(values.numel(), 0, -1, device=values.device)
        capped = sums - squares + left * squares
        budget = tau * (values >= 0).sum().double()
        cap = torch.where(capped < budget, values, 0.0).max()
        return torch.where(capped[-1] <= budget, torch.inf, cap)

    def second_moment_limit(self, tau: Number) -> Tensor:
        """M2PO's limit on |log-ratio|: the largest observed one up to which the mean square is at most `tau`.

        Negative when even the smallest is too much, or nothing is judged (arXiv 2510.01161, masking form). Equal
        values stay or go together, so that the order of tokens cannot matter.
        """
        if self.evidence.numel() == 0:
            return self.tokens.new_full((), NO_EVIDENCE)
        values, _, sums = self._ascending
        judged = values >= 0
        last_of_equals = torch.cat([values[1:] > values[:-1], judged.new_ones(1)])
        within = last_of_equals & judged & (sums <= tau * judged.cumsum(0).double())
        return torch.where(within, values, NO_EVIDENCE).max()
