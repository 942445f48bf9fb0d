"""The weight a preset gives each token, taken from the gradient of its objective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add

import numpy as np
import torch
from torch import Tensor

from trimtab.corrections.ratios import Ratios, log_ratio
from trimtab.corrections.reduce import Sequences
from trimtab.diagnosis.records import Chunk
from trimtab.objectives import Aggregation, Objective, PolicyLogps
from trimtab.objectives.calibrate import Observed

WASTE, SLACK = 1.25, 64
"""Longest over shortest response of one padded block; and how many tokens longer it may be in any case."""


@dataclass(frozen=True, eq=False)
class Block:
    """Responses of similar length as padded rows (rows, time); advantage (rows, 1) is its sign, 0 where unknown."""

    trainer: Tensor
    behavior: Tensor
    mask: Tensor
    sign: Tensor


@dataclass(frozen=True, eq=False)
class Data:
    """All responses, in blocks that together are one batch.

    trained: trained tokens. known: whether the sign of every advantage is known.
    """

    blocks: Sequence[Block]
    trained: int
    known: bool

    @classmethod
    def of(cls, chunk: Chunk) -> Data:
        sign = np.zeros(chunk.responses) if chunk.advantage is None else np.sign(np.nan_to_num(chunk.advantage))
        usable = np.flatnonzero(np.diff(chunk.starts) > 0)
        blocks = [_block(chunk, sign, rows) for rows in _alike(np.diff(chunk.starts), usable)]
        trained = sum(int(block.mask.sum()) for block in blocks)
        return cls(blocks, trained, bool((sign[usable] != 0).all()))

    @property
    def observed(self) -> Observed:
        return reduce(add, (Observed.of(block.trainer, block.behavior, block.mask) for block in self.blocks))

    def ratio(self, level: str) -> Tensor:
        """trainer/sampler of the trained tokens (trained,), float64; above token level that of their response."""
        parts = []
        for block in self.blocks:
            sequences = Sequences(block.mask)
            values = Ratios(log_ratio(block.trainer, block.behavior, block.mask), sequences).at(level)
            parts.append(values.expand(block.mask.shape)[block.mask])
        return torch.cat(parts).double()


def weights(built: Objective, data: Data, unknown: float) -> Tensor:
    """The applied weight of every trained token (trained,), float64, at the first update of the data as one batch.

    There the current policy is the proximal one, so the gradient beside the advantage is the correction and nothing
    else: d loss / d log pi, over what one token alone would get were trainer and sampler equal. `unknown`: the sign
    taken where an advantage is 0 or unknown, +1 or -1.
    """
    plain = plainly(built)
    logps = [_logps(block, block.trainer) for block in data.blocks]
    signs = [torch.where(block.sign == 0, unknown, block.sign) for block in data.blocks]
    state = reduce(add, (plain.prepare(part, sign) for part, sign in zip(logps, signs, strict=True)))
    found = []
    for block, sign in zip(data.blocks, signs, strict=True):
        current = block.trainer.clone().requires_grad_()
        loss = plain(_logps(block, current), sign, state=state).loss
        (gradient,) = torch.autograd.grad(loss, current)
        found.append((gradient * sign)[block.mask])
    return torch.cat(found).double() * data.trained / _of_one_token(plain)


def plainly(built: Objective) -> Objective:
    """The same correction under the plain token mean: whatever is shared by all tokens cancels in a weight."""
    return replace(built, name="plain", aggregation=Aggregation(), notes=())


def unbounded(built: Objective) -> Objective:
    """The same ratios without a single bound, mask or clip."""
    weight = None if built.weight is None else replace(built.weight, bound="truncate", min=None, max=None)
    return plainly(replace(built, weight=weight, masks=(), surrogate=built.surrogate.unbounded()))


def _of_one_token(plain: Objective) -> float:
    """The gradient a token of advantage 1 gets when it is the whole batch and all policies agree on it."""
    agreed = torch.full((1, 1), -1.0)
    block = Block(agreed, agreed, torch.ones(1, 1, dtype=torch.bool), torch.ones(1, 1))
    current = agreed.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(plain(_logps(block, current), block.sign).loss, current)
    return float(gradient)


def _logps(block: Block, current: Tensor) -> PolicyLogps:
    return PolicyLogps(
        current=current,
        behavior=block.behavior,
        mask=block.mask,
        proximal=block.trainer,
        off_policy=torch.zeros_like(block.mask),
    )


def _alike(lengths: np.ndarray, rows: np.ndarray) -> list[np.ndarray]:
    """The rows, shortest first, cut wherever padding to the longest would waste too much."""
    rows = rows[np.argsort(lengths[rows], kind="stable")]
    cuts, start = [], 0
    for place, length in enumerate(lengths[rows]):
        if length > max(WASTE * lengths[rows[start]], lengths[rows[start]] + SLACK):
            cuts.append(place)
            start = place
    return [part for part in np.split(rows, cuts) if len(part)]


def _block(chunk: Chunk, sign: np.ndarray, rows: np.ndarray) -> Block:
    lengths = np.diff(chunk.starts)[rows]
    places = np.arange(lengths.max())[None, :]
    real = places < lengths[:, None]
    index = np.where(real, chunk.starts[rows][:, None] + places, 0)
    return Block(
        trainer=torch.from_numpy(chunk.trainer[index]),
        behavior=torch.from_numpy(chunk.behavior[index]),
        mask=torch.from_numpy(chunk.mask[index] & real),
        sign=torch.from_numpy(sign[rows].astype(np.float32))[:, None],
    )
