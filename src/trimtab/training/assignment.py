"""Assigns the micro-batches of one update to ranks.

Every rank holds the whole batch (token ids are small) and the same packing as one process would have, so that
perturbations, proximal log-probs and the update's denominators do not depend on how many ranks there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from trimtab.models.logprobs import TokenBatch
from trimtab.training.batching import MicroBatch
from trimtab.training.ranks import Ranks


def assign_micro_batches(sizes: Sequence[int], ranks: int) -> list[list[int | None]]:
    """For each rank the positions of its micro-batches, round by round; None where it has nothing to do.

    Ranks wait for one another in every layer of every round, so a round holds micro-batches of similar size; within a
    round the largest goes to the rank that has had the least. One rank keeps the order as it is.
    """
    if ranks == 1:
        return [list(range(len(sizes)))]
    order = sorted(range(len(sizes)), key=lambda position: (-sizes[position], position))
    shares: list[list[int | None]] = [[] for _ in range(ranks)]
    totals = [0] * ranks
    for start in range(0, len(order), ranks):
        found = order[start : start + ranks]
        least_first = sorted(range(ranks), key=lambda rank: (totals[rank], rank))
        for place, rank in enumerate(least_first):
            shares[rank].append(found[place] if place < len(found) else None)
            totals[rank] += sizes[found[place]] if place < len(found) else 0
    return shares


def assigned_micro_batches(batch: Sequence[MicroBatch], ranks: Ranks) -> Iterator[tuple[int, MicroBatch]]:
    """This rank's micro-batches with their positions in `batch`; empty ones, without rows, where others have more."""
    if ranks.size == 1:
        yield from enumerate(batch)
        return
    sizes = [int(micro.tokens.prompt_mask.sum() + micro.tokens.response_mask.sum()) for micro in batch]
    for position in assign_micro_batches(sizes, ranks.size)[ranks.rank]:
        yield (len(batch), empty_micro_batch(batch[0])) if position is None else (position, batch[position])


def empty_micro_batch(like: MicroBatch) -> MicroBatch:
    """No rows, and one token for the model: sharded ranks must run forward and backward together."""
    tokens, mask = like.tokens, like.mask
    one = torch.ones(1, 1, dtype=torch.bool, device=mask.device)
    nothing = mask.new_zeros(0, 1)
    number = torch.zeros(0, 1, device=mask.device)
    return MicroBatch(
        rows=(),
        tokens=TokenBatch(
            prompt_ids=tokens.prompt_ids[:1, -1:],
            prompt_mask=one,
            response_ids=tokens.prompt_ids[:1, -1:],
            response_mask=one,
            prompt_index=tokens.prompt_index.new_zeros(1),
        ),
        mask=nothing,
        behavior=number,
        off_policy=nothing,
        kept=None,
        advantage=number,
        proximal=None if like.proximal is None else number,
        reference=None if like.reference is None else number,
    )
