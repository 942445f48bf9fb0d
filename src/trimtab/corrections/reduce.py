"""Selection of trained tokens, and reductions of per-token values to sequences.

One row is one sequence unless `sequence_ids` are given: then tokens of equal id form one sequence, at any position
(several sequences packed into a row, or one trajectory split over several rows).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from trimtab.types import MIN_BEHAVIOR


def select(values: Float[Tensor, "batch time"], mask: Bool[Tensor, "batch time"]) -> Float[Tensor, "batch time"]:
    """Returns the values where `mask` is True and exactly 0 elsewhere, at least in float32.

    A product with the mask would keep NaN and inf; `where` keeps them out of the value and out of the gradient.
    """
    values = widen(values)
    if values.is_cpu and not (values.requires_grad and torch.is_grad_enabled()):
        # On a CPU `where` is a loop with a branch, 2 to 7 times slower than multiplying the bits by 1 or 0.
        bits = torch.int64 if values.dtype == torch.float64 else torch.int32
        return (values.view(bits) * mask).view(values.dtype)
    return torch.where(mask, values, 0.0)


def widen(values: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Converts to float32; float64 stays float64."""
    return values if values.dtype == torch.float64 else values.to(torch.float32)


def nan_below_minimum(behavior: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Returns the sampler's log-probs, with NaN in place of values below `MIN_BEHAVIOR`."""
    # On a CPU six times as fast as `where`. The bound is slightly lower, since values equal to it are replaced too.
    return torch.nn.functional.threshold(behavior, MIN_BEHAVIOR * (1 + 1e-6), torch.nan)


def finite_rows(
    mask: Bool[Tensor, "batch time"],
    *logps: Float[Tensor, "batch time"] | None,
    behavior: Float[Tensor, "batch time"] | None = None,
) -> Bool[Tensor, "batch 1"]:
    """Returns (batch, 1) bool: rows whose trained positions are finite in every given tensor (None is skipped).

    behavior: the sampler's log-probs; a value below `MIN_BEHAVIOR` counts as not finite. Rows with False are
    invalid data: drop them before computing advantages and denominators, and report them.
    """
    finite = torch.ones_like(mask)
    for logp in logps:
        if logp is not None:
            finite = finite & (torch.isfinite(logp) | ~mask)
    if behavior is not None:
        finite = finite & (torch.isfinite(nan_below_minimum(behavior)) | ~mask)
    return finite.all(dim=1, keepdim=True)


TURNS_UNKNOWN = (
    "what is computed for each model turn needs turn, which is None: give the number of the model turn of each token, "
    "or use another level"
)


def _number_distinct(*keys: Int[Tensor, "batch time"]) -> Int[Tensor, "batch time"]:
    """Returns numbers from 0 that are equal exactly where all keys are equal. No synchronization."""
    flat = [key.reshape(-1) for key in keys]
    order = torch.arange(flat[0].numel(), device=flat[0].device)
    for key in reversed(flat):
        order = order[key[order].argsort(stable=True)]
    differs = torch.zeros_like(order)
    for key in flat:
        differs[1:] |= (key[order][1:] != key[order][:-1]).long()
    return torch.zeros_like(order).scatter(0, order, differs.cumsum(0)).view(keys[0].shape)


@dataclass(frozen=True, eq=False)
class Sequences:
    """The sequences of one batch: reductions from (batch, time) to (sequences, 1) and back.

    mask: (batch, time), True at trained tokens.
    ids: (batch, time) integers in [0, batch * time); negative at padding, which must not be trained.
    turn: (batch, time) integers, the number of the model turn of each token in its sequence; negative at padding.

    Values to reduce must already be 0 where `mask` is False.
    """

    mask: Bool[Tensor, "batch time"]
    ids: Int[Tensor, "batch time"] | None = None
    turn: Int[Tensor, "batch time"] | None = None

    @cached_property
    def turns(self) -> Sequences:
        """`Sequences` in which every turn is a separate sequence. Raises `ValueError` if turns are not known."""
        if self.turn is None:
            raise ValueError(TURNS_UNKNOWN)
        rows = torch.arange(len(self.mask), device=self.mask.device)[:, None]
        sequence = rows.expand_as(self.mask) if self.ids is None else self.ids
        padding = (self.turn < 0) | (sequence < 0)
        ids = torch.where(padding, -1, _number_distinct(sequence, self.turn))
        return replace(self, ids=ids, turn=None)

    @cached_property
    def slots(self) -> Int[Tensor, "positions"]:
        """The index of each position's sequence in the results of reductions. Padding has an extra index."""
        if self.ids is None:
            rows = torch.arange(len(self.mask), device=self.mask.device)
            return rows[:, None].expand_as(self.mask).reshape(-1)
        # One extra slot collects the padding. A trained token with a negative id keeps that id, so that scatter raises
        # an index error instead of dropping the token.
        padding = (self.ids < 0) & ~self.mask
        return torch.where(padding, self.ids.numel(), self.ids).reshape(-1).to(torch.int64)

    def _scatter(self, values: Float[Tensor, "batch time"], reduce: str) -> Float[Tensor, "sequences 1"]:
        zeros = values.new_zeros(values.numel() + 1)
        total = zeros.scatter_reduce(0, self.slots, values.reshape(-1), reduce, include_self=reduce == "sum")
        return total[:-1, None]

    def sum(self, values: Float[Tensor, "batch time"]) -> Float[Tensor, "sequences 1"]:
        """Returns the sum over each sequence."""
        return values.sum(dim=1, keepdim=True) if self.ids is None else self._scatter(values, "sum")

    def max(self, values: Float[Tensor, "batch time"]) -> Float[Tensor, "sequences 1"]:
        """Returns the largest value of each sequence, including the zeros of untrained positions."""
        return values.amax(dim=1, keepdim=True) if self.ids is None else self._scatter(values, "amax")

    def mean(self, values: Float[Tensor, "batch time"]) -> Float[Tensor, "sequences 1"]:
        """Returns the mean over the trained tokens of each sequence; 0 if it has no trained token."""
        return self.sum(values) / self.lengths.clamp(min=1)

    def spread(self, per_sequence: Tensor) -> Tensor:
        """Returns the value of each token's sequence: (sequences, 1) -> broadcastable to (batch, time)."""
        if self.ids is None:
            return per_sequence
        padding = per_sequence.new_zeros((1, 1))
        return torch.cat([per_sequence, padding])[self.slots, 0].view(self.mask.shape)

    def prefix_sum(self, values: Float[Tensor, "batch time"]) -> Float[Tensor, "batch time"]:
        """Returns at each token the sum over its sequence up to and including the token."""
        if self.ids is None:
            return values.cumsum(dim=1)
        order, first = self._by_sequence
        ordered = values.reshape(-1)[order].double()
        running = ordered.cumsum(0)
        sums = running - (running - ordered)[first]
        return torch.empty_like(sums).scatter(0, order, sums).view(values.shape).to(values.dtype)

    @cached_property
    def _by_sequence(self) -> tuple[Int[Tensor, "positions"], Int[Tensor, "positions"]]:
        """The positions sorted by sequence; and for each, the index in this order where its sequence begins."""
        order = self.slots.argsort(stable=True)
        slots = self.slots[order]
        return order, torch.searchsorted(slots, slots)

    @cached_property
    def positions(self) -> Float[Tensor, "batch time"]:
        """Number of trained tokens of the sequence up to and including each token: 1 at its first trained token."""
        return self.prefix_sum(self.mask.to(torch.float32))

    def count(self, where: Bool[Tensor, "batch time"]) -> Float[Tensor, "sequences 1"]:
        """Returns the number of tokens of each sequence at which `where` is True; it must be False outside the mask."""
        return self.sum(where.view(torch.uint8).to(torch.float32))

    @cached_property
    def lengths(self) -> Float[Tensor, "sequences 1"]:
        """T: number of trained tokens of each sequence, without padding."""
        return self.count(self.mask)

    @cached_property
    def present(self) -> Bool[Tensor, "sequences 1"]:
        """Sequences that exist, including those without a trained token."""
        if self.ids is None:
            return torch.ones_like(self.mask[:, :1])
        present = torch.zeros(self.mask.numel() + 1, dtype=torch.bool, device=self.mask.device)
        return present.index_fill(0, self.slots, True)[:-1, None]

    @cached_property
    def trained(self) -> Bool[Tensor, "sequences 1"]:
        """Sequences with at least one trained token."""
        return self.lengths > 0
