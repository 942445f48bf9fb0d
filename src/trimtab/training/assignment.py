"""Assigns the micro-batches of one update to ranks, and merges their results.

Every rank holds the whole batch (token ids are small) and the same packing as one process would have, so that
perturbations, proximal log-probs and the update's denominators do not depend on how many ranks there are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, TypeVar

import torch
from safetensors.torch import load, save
from torch import Tensor

from trimtab.corrections.statistics import Mergeable
from trimtab.models.logprobs import TokenBatch
from trimtab.objectives.metrics import Metrics
from trimtab.training.batching import MicroBatch
from trimtab.training.ranks import Ranks

if TYPE_CHECKING:
    from trimtab.training.learner import UpdateStats

Part = TypeVar("Part", bound=Mergeable)


def deal(sizes: Sequence[int], ranks: int) -> list[list[int | None]]:
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


def dealt(batch: Sequence[MicroBatch], ranks: Ranks) -> Iterator[tuple[int, MicroBatch]]:
    """This rank's micro-batches with their positions in `batch`; empty ones, without rows, where others have more."""
    if ranks.size == 1:
        yield from enumerate(batch)
        return
    sizes = [int(micro.tokens.prompt_mask.sum() + micro.tokens.response_mask.sum()) for micro in batch]
    for position in deal(sizes, ranks.size)[ranks.rank]:
        yield (len(batch), filler(batch[0])) if position is None else (position, batch[position])


def filler(like: MicroBatch) -> MicroBatch:
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


def neutral(metrics: Metrics) -> Metrics:
    """What adds nothing: the metrics of an empty micro-batch without its counts (there was no micro-batch)."""
    return Metrics({name: _neutral(part) for name, part in metrics.parts.items()})


def _neutral(part: Part) -> Part:
    sums = {f.name: torch.zeros_like(getattr(part, f.name)) for f in fields(part) if "merge" not in f.metadata}
    return replace(part, **sums)


def summed(metrics: Metrics, ranks: Ranks) -> Metrics:
    """Statistics of all ranks; every rank must have the same ones."""
    mine = {
        f"{name}|{f.name}": value
        for name, part in metrics.parts.items()
        for f in fields(part)
        if isinstance(value := getattr(part, f.name), Tensor)
    }
    parts = []
    for data in ranks.gather(_packed(mine)):
        found: dict[str, dict[str, Tensor]] = {}
        for key, tensor in load(data).items():
            name, _, place = key.rpartition("|")
            found.setdefault(name, {})[place] = tensor
        parts.append(Metrics({name: replace(part, **found[name]) for name, part in metrics.parts.items()}))
    return reduce(add, parts)


def exchanged(mine: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """Tensors of all ranks by name, on the CPU; no two ranks may use the same name."""
    found: dict[str, Tensor] = {}
    for data in ranks.gather(_packed(mine)):
        found |= load(data)
    return found


def _packed(tensors: Mapping[str, Tensor]) -> bytes:
    """Copies: the format refuses tensors that share memory."""
    return save({name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()})


def joined(stats: UpdateStats, ranks: Ranks) -> None:
    """Make the statistics of one rank's share those of the whole batch, in place, on every rank."""
    if stats.objective is not None:
        stats.objective = summed(stats.objective, ranks)
    if stats.mismatch is not None:
        stats.mismatch = summed(stats.mismatch, ranks)
    mine = {f"anchors|{row}": torch.from_numpy(logps) for row, logps in stats.anchors.items()}
    mine |= {f"perturbed|{row}": torch.from_numpy(logps) for row, logps in stats.perturbed.items()}
    kinds = {"anchors": stats.anchors, "perturbed": stats.perturbed}
    for name, tensor in exchanged(mine, ranks).items():
        kind, _, row = name.partition("|")
        kinds[kind][int(row)] = tensor.numpy()
    counts = stats.changes.counts() if stats.changes is not None else {}
    sums = {name: getattr(stats, name) for name in ("tokens", "agreed", "routed")}
    said = {"versions": stats.versions, "changes": counts, "sums": sums}
    parts = [json.loads(part) for part in ranks.gather(json.dumps(said).encode())]
    for name in sums:
        setattr(stats, name, sum(part["sums"][name] for part in parts))
    for part in parts:
        stats.versions |= {int(row): version for row, version in part["versions"].items()}
    if stats.changes is not None:
        stats.changes = type(stats.changes).merged([part["changes"] for part in parts])
