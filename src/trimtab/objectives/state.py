"""What spans one optimizer update: denominators, the mean weight, M2PO's evidence.

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


def _join(left: Tensor, right: Tensor) -> Tensor:
    return torch.cat([left, right])


def gathered(values: Float[Tensor, "mine"], group: dist.ProcessGroup | None) -> Float[Tensor, "all"]:
    """Every rank's values, padded with zeros to equal lengths."""
    size = torch.tensor([values.numel()], device=values.device)
    dist.all_reduce(size, op=dist.ReduceOp.MAX, group=group)
    padded = torch.nn.functional.pad(values, (0, int(size) - values.numel()))
    parts = [torch.empty_like(padded) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, padded, group=group)
    return torch.cat(parts)


@dataclass(frozen=True, eq=False)
class State:
    """Counts are float64 scalars. `harmful` (n,) holds |log-ratio| of M2PO's harmful tokens, 0 elsewhere.

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
    harmful: Float[Tensor, "tokens"] = field(metadata={"merge": _join})

    def __add__(self, other: State) -> State:
        return State(
            **{
                part.name: part.metadata.get("merge", torch.add)(getattr(self, part.name), getattr(other, part.name))
                for part in fields(self)
            }
        )

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name: all but `harmful` are sums, `harmful` is a collection."""
        return {part.name: getattr(self, part.name) for part in fields(self)}

    def replaced(self, tensors: Mapping[str, Tensor]) -> State:
        """The same state with some tensors exchanged, such as after a reduction over ranks."""
        return replace(self, **tensors)

    def all_reduce(self, group: dist.ProcessGroup | None = None) -> State:
        """The state of the whole update when every data-parallel rank holds a part. Waits for the other ranks."""
        named = self.tensors()
        harmful = gathered(named.pop("harmful"), group)
        sums = torch.stack(list(named.values()))
        dist.all_reduce(sums, group=group)
        return self.replaced({**dict(zip(named, sums.unbind(), strict=True)), "harmful": harmful})

    @cached_property
    def _capped_squares(self) -> tuple[Tensor, Tensor]:
        """Harmful log-ratios v ascending, and for each the sum of min(square, v^2) over all of them."""
        values = self.harmful.double().sort().values
        squares = values.square()
        left = torch.arange(values.numel(), 0, -1, device=values.device)
        return values, squares.cumsum(0) - squares + left * squares

    def second_moment_cap(self, tau: Number) -> Tensor:
        """M2PO's cap on |log-ratio|: the largest observed one whose capped second moment stays below `tau`.

        Infinite while the mean square over harmful tokens is at most `tau`; 0 when even the smallest is too much
        (arXiv 2510.01161, as in its official code).
        """
        if self.harmful.numel() == 0:
            return self.tokens.new_full((), torch.inf)
        values, capped = self._capped_squares
        budget = tau * (values > 0).sum()
        cap = torch.where(capped < budget, values, 0.0).max()
        return torch.where(capped[-1] <= budget, torch.inf, cap)
