"""What each preset would do to the data at its first update: shares kept, clipped and weighted, per preset.

With w_t the applied weight of trained token t: the gradient the preset's own loss gives the token, over the gradient it
would give were trainer and sampler equal (docs/recommendations.md):

    kept     share of t with w_t != 0
    changed  share of t with w_t != 0 that differs from the weight without any bound
    ess      (sum w)^2 / (n sum w^2), tokens that lost their weight counted
    bias     mean_t |w_t - rho_t|, rho_t at the level the preset weighs at (token, or the product over the response)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add

import numpy as np
import torch
from torch import Tensor

from trimtab.corrections.ratios import Ratios, log_ratio
from trimtab.corrections.reduce import Sequences
from trimtab.diagnosis.records import Chunk, Outcome
from trimtab.errors import TrimtabError
from trimtab.objectives import Aggregation, Objective, PolicyLogps, Regression, objective, objectives
from trimtab.objectives.calibrate import Observed, bounds_of, calibrated

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


SAME = 1e-5
"""Relative difference of two float32 weights that rounding explains."""

NOTES = {
    "token-alp": "without noise: the bypass with these bounds",
    "seq-alp": "without noise: the bypass with these bounds",
    "soup": "with these responses as they are: the token bypass with these bounds",
    "luffy": "without external traces: the mismatch is ignored",
    "m2po": "its bound is found over all of this data, not batch by batch",
    "oapl": "a regression: the ratio is its target, so bias does not compare with the others",
}


def outcomes(data: Data, presets: Sequence[str] = ()) -> tuple[Outcome, ...]:
    """One row a preset, in their order (default: all of `trimtab.objectives()`), followed by one with its bounds from
    this data where it has any. No rows when no token is trained on."""
    if data.trained == 0:
        return ()
    table = _Table(data)
    return tuple(row for name in presets or objectives() for row in table.rows(name))


class _Table:
    """Rows over one data set, with the weights that many presets share."""

    def __init__(self, data: Data) -> None:
        self.data = data
        self.observed = data.observed
        self.ratio = {level: data.ratio(level) for level in ("token", "sequence")}
        self._unbounded: dict[tuple[Objective, float], Tensor] = {}

    def rows(self, name: str) -> Iterator[Outcome]:
        yield self._row(objective(name), {})
        if not bounds_of(name):
            return
        try:
            bounds = calibrated(name, self.observed)
        except TrimtabError:
            return  # Too little data to take bounds from: only the published ones can be shown.
        yield self._row(objective(name, **bounds), bounds)

    def _row(self, built: Objective, bounds: Mapping[str, float]) -> Outcome:
        unknown = (1.0, -1.0) if _signed(built) and not self.data.known else (1.0,)
        kept, changed, ess, bias = np.mean([self._look(built, sign) for sign in unknown], axis=0).tolist()
        note = _note(built, both=len(unknown) == 2)
        return Outcome(built.name, kept, changed, ess, bias, dict(bounds), bool(bounds), note)

    def _look(self, built: Objective, unknown: float) -> tuple[float, float, float, float]:
        weight = weights(built, self.data, unknown)
        free = self._free(built, unknown)
        kept = weight != 0
        moved = kept & ((weight - free).abs() > SAME * free.abs())
        square = float(weight.square().mean())
        return (
            float(kept.double().mean()),
            float(moved.double().mean()),
            float(weight.mean().square()) / square if square > 0 else 0.0,
            float((weight - self.ratio[_level(built)]).abs().mean()),
        )

    def _free(self, built: Objective, unknown: float) -> Tensor:
        key = unbounded(built), unknown
        if key not in self._unbounded:
            self._unbounded[key] = weights(key[0], self.data, unknown)
        return self._unbounded[key]


def _signed(built: Objective) -> bool:
    """Whether the sign of the advantage decides: a clip on a ratio that is not 1 yet, OPSM, a regression on it."""
    return built.ratio.over == "behavior" or any("advantage" in rule.reads for rule in built.masks)


def _level(built: Objective) -> str:
    """Where the preset weighs against the sampler."""
    if isinstance(built.surrogate, Regression):
        return "token"
    level = built.weight.level if built.weight is not None else built.ratio.level
    return "sequence" if level == "sequence" else "token"


def _note(built: Objective, *, both: bool) -> str:
    notes = [NOTES[built.name]] if built.name in NOTES else []
    if both:
        notes.append("the sign of the advantage decides: mean of both where it is unknown or 0")
    return "; ".join(notes)
