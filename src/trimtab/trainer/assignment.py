"""Assigns the micro-batches of one update to ranks.

Every rank holds the whole batch (token ids are small) and packs it as a single process would, so that perturbations,
proximal log-probs and the denominators of an update do not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from trimtab.trainer.batching import MicroBatch
from trimtab.trainer.models.logprobs import TokenBatch
from trimtab.trainer.ranks import RankGroup


def assign_micro_batches(sizes: Sequence[int], ranks: int) -> list[list[int | None]]:
    """Returns for each rank the positions of its micro-batches, one for each round; None in a round without one.

    Ranks wait for one another in every layer of every round, so a round holds micro-batches of similar size. Within a
    round the largest one goes to the rank with the fewest tokens so far. One rank keeps the order.
    """
    if ranks == 1:
        return [list(range(len(sizes)))]
    order = sorted(range(len(sizes)), key=lambda position: (-sizes[position], position))
    shares: list[list[int | None]] = [[] for _ in range(ranks)]
    totals = [0] * ranks
    for start in range(0, len(order), ranks):
        positions = order[start : start + ranks]
        least_first = sorted(range(ranks), key=lambda rank: (totals[rank], rank))
        for index, rank in enumerate(least_first):
            shares[rank].append(positions[index] if index < len(positions) else None)
            totals[rank] += sizes[positions[index]] if index < len(positions) else 0
    return shares


def assigned_micro_batches(batch: Sequence[MicroBatch], ranks: RankGroup) -> Iterator[tuple[int, MicroBatch]]:
    """Yields this rank's micro-batches with their positions in `batch`; an empty one in rounds without one."""
    if ranks.size == 1:
        yield from enumerate(batch)
        return
    sizes = [len(micro.tokens.places.prompt) + len(micro.tokens.places.real) for micro in batch]
    for position in assign_micro_batches(sizes, ranks.size)[ranks.rank]:
        yield (len(batch), empty_micro_batch(batch[0])) if position is None else (position, batch[position])


def empty_micro_batch(like: MicroBatch) -> MicroBatch:
    """A micro-batch without rows but with one token to run: sharded ranks must run forward and backward together."""
    tokens, mask = like.tokens, like.mask
    one = torch.ones(1, 1, dtype=torch.bool, device=mask.device)
    no_mask = mask.new_zeros(0, 1)
    no_values = torch.zeros(0, 1, device=mask.device)
    return MicroBatch(
        rows=(),
        tokens=TokenBatch(
            prompt_ids=tokens.prompt_ids[:1, -1:],
            prompt_mask=one,
            response_ids=tokens.prompt_ids[:1, -1:],
            response_mask=one,
            prompt_index=tokens.prompt_index.new_zeros(1),
        ),
        mask=no_mask,
        behavior=no_values,
        turn=tokens.prompt_index.new_zeros(0, 1),
        off_policy=no_mask,
        age=tokens.prompt_index.new_ones(0, 1),
        advantage=no_values,
        proximal=None if like.proximal is None else no_values,
        reference=None if like.reference is None else no_values,
    )
