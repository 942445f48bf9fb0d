"""Packs trajectories into tensors: mini-batches (one optimizer update) of micro-batches (one forward and backward).

Groups stay together, so that a prompt is computed once for all its samples. A batch is packed once; the proximal pass
and every epoch use the same packing, so that the ratio of the first update is exactly 1.

Every rank holds the whole batch (token ids are small) and packs it as a single process would, so that perturbations,
proximal log-probs and the denominators of an update do not depend on the number of ranks. Each rank then computes its
share of the micro-batches (`assigned_micro_batches`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from trimtab.corrections import finite_rows
from trimtab.trainer.models.logprobs import TokenBatch
from trimtab.trainer.ranks import RankGroup
from trimtab.types import Trajectory


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Some rows of a batch as tensors, of shape (rows, time) unless stated otherwise."""

    rows: tuple[int, ...]  # positions in the batch's list of trajectories
    tokens: TokenBatch  # prompts and responses, padded
    mask: torch.Tensor  # bool, True at trained tokens
    behavior: torch.Tensor  # float32 log-probs of the sampler; NaN at tokens of external traces, 0 at observations
    turn: torch.Tensor  # int64, number of the model turn from 0, as `Completion.turn`; -1 at padding
    off_policy: torch.Tensor  # bool, True at tokens of external traces
    age: torch.Tensor  # int64, in steps: 1 for tokens of this step's first policy, 2 for the policy a step earlier
    advantage: torch.Tensor  # or (rows, 1); NaN until computed, so that a loss that reads it too early is NaN
    proximal: torch.Tensor | None = None  # float32 log-probs; None until scored
    reference: torch.Tensor | None = None  # float32 log-probs; None until scored
    squares: torch.Tensor | None = None  # sum of p^2 over the vocabulary, if the advantages read it
    extras: Mapping[str, Any] = field(default_factory=dict)  # what features have attached, by name (`features/`)

    @property
    def on_policy(self) -> torch.Tensor:
        """(rows, time) bool, True at trained tokens that a policy of the run sampled."""
        return self.mask & ~self.off_policy

    def with_scores(self, **scores: Any) -> MicroBatch:
        return replace(self, **scores)

    def with_extras(self, **extras: Any) -> MicroBatch:
        return replace(self, extras={**self.extras, **extras})


MiniBatch = list[MicroBatch]


def split_minibatches(groups: Sequence[Sequence[int]], minibatches: int) -> list[list[Sequence[int]]]:
    """Splits groups in order into `minibatches` nearly equal parts; empty parts are left out."""
    bounds = np.linspace(0, len(groups), minibatches + 1).round().astype(int)
    return [list(groups[low:high]) for low, high in pairwise(bounds) if high > low]


class _Size(NamedTuple):
    """Padded extent of some rows: `prompts` x `prompt` prompt tokens and `rows` x `response` response tokens."""

    prompts: int = 0
    prompt: int = 0
    rows: int = 0
    response: int = 0

    @property
    def tokens(self) -> int:
        return self.prompts * self.prompt + self.rows * self.response

    def merge(self, other: _Size) -> _Size:
        return _Size(
            self.prompts + other.prompts,
            max(self.prompt, other.prompt),
            self.rows + other.rows,
            max(self.response, other.response),
        )


def micro_batches(
    trajectories: Sequence[Trajectory], groups: Sequence[Sequence[int]], token_budget: int
) -> Iterator[tuple[int, ...]]:
    """Yields the rows of each micro-batch: groups in order, large ones in parts, up to `token_budget` padded tokens."""
    rows: list[int] = []
    size = _Size()
    for group in groups:
        for piece, extent in _pieces(trajectories, group, token_budget):
            if rows and size.merge(extent).tokens > token_budget:
                yield tuple(rows)
                rows, size = [], _Size()
            rows.extend(piece)
            size = size.merge(extent)
    if rows:
        yield tuple(rows)


def to_tensors(
    trajectories: Sequence[Trajectory],
    rows: Sequence[int],
    pad_id: int,
    device: torch.device,
    *,
    version: int = 0,
    updates_per_step: int = 1,
    share_prompts: bool = True,
) -> MicroBatch:
    """Returns the chosen trajectories as padded tensors on `device`.

    version: number of updates before the step; with `updates_per_step` it determines the ages. share_prompts: whether
    each group's prompt appears, and is computed, once.
    """
    chosen = [trajectories[row] for row in rows]
    keys = [t.group if share_prompts else row for t, row in zip(chosen, rows, strict=True)]
    first = dict(zip(reversed(keys), reversed(chosen), strict=True))
    prompt_index = {key: index for index, key in enumerate(dict.fromkeys(keys))}
    tokens = TokenBatch.pack(
        [first[key].prompt.ids for key in prompt_index],
        [t.completion.response_ids for t in chosen],
        [prompt_index[key] for key in keys],
        pad_id=pad_id,
    )
    time = tokens.response_ids.shape[1]
    completions = [t.completion for t in chosen]
    behavior = [np.where(c.sampled, c.logp_behavior, np.float32(0)) for c in completions]
    # Rounded up: a policy from the middle of a step is as old as the policy at the start of that step.
    ages = [1 + np.maximum(0, -((c.policy_version - version) // updates_per_step)) for c in completions]
    return MicroBatch(
        rows=tuple(rows),
        tokens=tokens.to(device),
        mask=pad([t.loss_mask for t in chosen], time, False).to(device),
        behavior=pad(behavior, time, 0.0).to(device),
        turn=pad([c.turn for c in completions], time, -1).to(device),
        off_policy=pad([np.full(len(t), t.off_policy) for t in chosen], time, False).to(device),
        age=pad(ages, time, 1).to(device),
        advantage=torch.full((len(chosen), 1), float("nan"), device=device),
    )


def rows_with_non_finite_proximal(minibatches: Sequence[Sequence[MicroBatch]]) -> set[int]:
    """Returns the rows with a proximal log-prob that is not finite at a trained token."""
    bad: set[int] = set()
    for micro in (micro for minibatch in minibatches for micro in minibatch):
        if micro.proximal is not None:
            finite = finite_rows(micro.mask, micro.proximal)
            bad |= {row for row, good in zip(micro.rows, finite[:, 0].tolist(), strict=True) if not good}
    return bad


def _pieces(trajectories: Sequence[Trajectory], group: Sequence[int], budget: int) -> Iterator[tuple[list[int], _Size]]:
    """Yields parts of one group that fit the budget; a sample that alone exceeds the budget is one part."""
    empty = _Size(prompts=1, prompt=len(trajectories[group[0]].prompt.ids))
    piece: list[int] = []
    size = empty
    for row in group:
        added = _Size(rows=1, response=len(trajectories[row]))
        if piece and size.merge(added).tokens > budget:
            yield piece, size
            piece, size = [], empty
        piece.append(row)
        size = size.merge(added)
    yield piece, size


def pad(rows: Sequence[np.ndarray], time: int, value: float | bool) -> torch.Tensor:
    """Returns rows of values as one tensor (rows, time), padded on the right."""
    padded = np.full((len(rows), time), value, dtype=rows[0].dtype)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return torch.from_numpy(padded)


def assign_micro_batches(sizes: Sequence[int], ranks: int) -> list[list[int | None]]:
    """Returns for each rank the position of its micro-batch in each round, None if it has none in that round.

    Ranks wait for one another in every layer of every round, so a round holds micro-batches of similar size. Within a
    round the largest one goes to the rank with the fewest tokens so far. A single rank keeps the order.
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
    """Yields this rank's micro-batches and their positions in `batch`; if a round has none for it, an empty one."""
    if ranks.size == 1:
        yield from enumerate(batch)
        return
    sizes = [len(micro.tokens.places.prompt) + len(micro.tokens.places.real) for micro in batch]
    for position in assign_micro_batches(sizes, ranks.size)[ranks.rank]:
        yield (len(batch), empty_micro_batch(batch[0])) if position is None else (position, batch[position])


def empty_micro_batch(like: MicroBatch) -> MicroBatch:
    """Returns a micro-batch of one token, without rows: sharded ranks must run forward and backward together."""
    tokens = like.tokens
    one_id, real = tokens.prompt_ids[:1, -1:], torch.ones(1, 1, dtype=torch.bool, device=like.mask.device)
    one = TokenBatch(one_id, real, one_id, real, tokens.prompt_index.new_zeros(1))
    values = ((item.name, getattr(like, item.name)) for item in fields(like))
    empty: dict[str, Any] = {name: value[:0, :1] for name, value in values if isinstance(value, torch.Tensor)}
    return MicroBatch(rows=(), tokens=one, **empty)
