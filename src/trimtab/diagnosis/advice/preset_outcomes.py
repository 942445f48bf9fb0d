"""The effect of each preset on the data at its first update: shares of tokens kept, clipped and weighted.

w_t is the applied weight of trained token t: its gradient under the preset's loss, divided by the gradient that it
would have if trainer and sampler were equal (docs/choosing.md):

    kept     share of t with w_t != 0
    changed  share of t with w_t != 0 that differs from the weight without any bound
    ess      (sum w)^2 / (n sum w^2), with w = 0 for rejected tokens
    bias     mean_t |w_t - rho_t|, rho_t at the level of the preset's weight (token, or product over response or turn)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, reduce
from operator import add

import numpy as np
import torch
from torch import Tensor

from trimtab.corrections.ratios import PRODUCTS, TOKEN_LEVELS, Ratios, log_ratio, units_of
from trimtab.corrections.reduce import Sequences
from trimtab.diagnosis.records import PresetOutcome
from trimtab.diagnosis.tokens import TokenTable
from trimtab.errors import TrimtabError
from trimtab.objectives import Aggregation, Objective, PolicyLogps, Regression, objective, objectives
from trimtab.objectives.calibrate import Observed, bounds_of, calibrated

MAX_LENGTH_RATIO, MIN_LENGTH_SLACK = 1.25, 64
"""Largest ratio of longest to shortest response of a padded block, and a difference that is always allowed."""


@dataclass(frozen=True, eq=False)
class PaddedBlock:
    """Responses of similar length as padded rows (rows, time).

    turn: number of the turn of each token. sign: (rows, 1), of the advantage, 0 where unknown.
    """

    trainer: Tensor
    behavior: Tensor
    mask: Tensor
    turn: Tensor
    sign: Tensor

    @property
    def sequences(self) -> Sequences:
        return Sequences(self.mask, turn=self.turn)


@dataclass(frozen=True, eq=False)
class AdviceData:
    """All responses as one batch, in blocks of similar length.

    trained: number of trained tokens. known: whether the sign of every advantage is known.
    """

    blocks: Sequence[PaddedBlock]
    trained: int
    known: bool

    @classmethod
    def of(cls, table: TokenTable) -> AdviceData:
        sign = np.zeros(table.responses) if table.advantage is None else np.sign(np.nan_to_num(table.advantage))
        usable = np.flatnonzero(table.lengths > 0)
        blocks = [_pad_block(table, sign, rows) for rows in _split_by_length(table.lengths, usable)]
        trained = sum(int(block.mask.sum()) for block in blocks)
        return cls(blocks, trained, bool((sign[usable] != 0).all()))

    @property
    def observed(self) -> Observed:
        return reduce(add, (Observed.of(of.trainer, of.behavior, of.mask, turn=of.turn) for of in self.blocks))

    def ratio(self, level: str) -> Tensor:
        """Returns trainer/sampler at the trained tokens (trained,), float64; above token level that of its unit."""
        parts = []
        for block in self.blocks:
            values = Ratios(log_ratio(block.trainer, block.behavior, block.mask), block.sequences).at(level)
            spread = values if level in TOKEN_LEVELS else units_of(block.sequences, level).spread(values)
            parts.append(spread.expand(block.mask.shape)[block.mask])
        return torch.cat(parts).double()


def weights(built: Objective, data: AdviceData, unknown: float) -> Tensor:
    """Returns the applied weight of every trained token (trained,), float64, at the first update on the data.

    There the current policy equals the proximal one, so that d loss / d log pi, divided by the advantage and by the
    gradient of one token with equal policies, is the correction. `unknown`: +1 or -1, the sign used where an advantage
    is 0 or unknown.
    """
    plain = with_token_mean(built)
    logps = [_logps(block, block.trainer) for block in data.blocks]
    signs = [torch.where(block.sign == 0, unknown, block.sign) for block in data.blocks]
    state = reduce(add, (plain.prepare(part, sign) for part, sign in zip(logps, signs, strict=True)))
    gradients = []
    for block, sign in zip(data.blocks, signs, strict=True):
        current = block.trainer.clone().requires_grad_()
        loss = plain(_logps(block, current), sign, state=state).loss
        (gradient,) = torch.autograd.grad(loss, current)
        gradients.append((gradient * sign)[block.mask])
    return torch.cat(gradients).double() * data.trained / _gradient_of_one_token(plain)


def with_token_mean(built: Objective) -> Objective:
    """Returns the objective with token-mean aggregation, since factors shared by all tokens cancel in a weight."""
    return replace(built, name="plain", aggregation=Aggregation(), notes=())


def unbounded(built: Objective) -> Objective:
    """Returns the objective without bounds, masks and clipping."""
    weight = None if built.weight is None else replace(built.weight, bound="truncate", min=None, max=None)
    return with_token_mean(replace(built, weight=weight, masks=(), surrogate=built.surrogate.unbounded()))


@cache
def _gradient_of_one_token(plain: Objective) -> float:
    """Returns the gradient of a batch of one token with advantage 1 and equal policies."""
    agreed = torch.full((1, 1), -1.0)
    mask = torch.ones(1, 1, dtype=torch.bool)
    block = PaddedBlock(agreed, agreed, mask, torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1))
    current = agreed.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(plain(_logps(block, current), block.sign).loss, current)
    return float(gradient)


def _logps(block: PaddedBlock, current: Tensor) -> PolicyLogps:
    return PolicyLogps(
        current=current,
        behavior=block.behavior,
        mask=block.mask,
        proximal=block.trainer,
        off_policy=torch.zeros_like(block.mask),
        turn=block.turn,
        age=torch.ones_like(block.turn),
    )


def _split_by_length(lengths: np.ndarray, rows: np.ndarray) -> list[np.ndarray]:
    """Returns the rows by length, split where padding would exceed `MAX_LENGTH_RATIO` and `MIN_LENGTH_SLACK`."""
    rows = rows[np.argsort(lengths[rows], kind="stable")]
    cuts, start = [], 0
    for index, length in enumerate(lengths[rows]):
        if length > max(MAX_LENGTH_RATIO * lengths[rows[start]], lengths[rows[start]] + MIN_LENGTH_SLACK):
            cuts.append(index)
            start = index
    return [part for part in np.split(rows, cuts) if len(part)]


def _pad_block(table: TokenTable, sign: np.ndarray, rows: np.ndarray) -> PaddedBlock:
    lengths = table.lengths[rows]
    positions = np.arange(lengths.max())[None, :]
    real = positions < lengths[:, None]
    index = np.where(real, table.starts[rows][:, None] + positions, 0)
    return PaddedBlock(
        trainer=torch.from_numpy(table.trainer[index]),
        behavior=torch.from_numpy(table.behavior[index]),
        mask=torch.from_numpy(table.mask[index] & real),
        turn=torch.from_numpy(table.turn_number[index]),
        sign=torch.from_numpy(sign[rows].astype(np.float32))[:, None],
    )


EQUAL_TOLERANCE = 1e-5
"""Relative difference up to which two float32 weights count as equal."""

NOTES = {
    "token-alp": "without noise: the bypass with these bounds",
    "seq-alp": "without noise: the bypass with these bounds",
    "soup": "with these responses as they are: the token bypass with these bounds",
    "luffy": "without external traces: the mismatch is ignored",
    "a3po": "as if all tokens were of age 1: the token bypass with these bounds",
    "m2po": "its bound is found over all of this data, not batch by batch",
    "oapl": "a regression: the ratio is its target, so bias does not compare with the others",
}


def outcomes(data: AdviceData, presets: Sequence[str] = ()) -> tuple[PresetOutcome, ...]:
    """Returns one row per preset, followed by one with calibrated bounds if it has any.

    Empty without a trained token. presets: by default all whose weights follow from the log-probs of sampled tokens,
    which is what files contain.
    """
    if data.trained == 0:
        return ()
    table = _OutcomeTable(data)
    rated = presets or [name for name in objectives() if not objective(name).centering]
    return tuple(row for name in rated for row in table.rows(name))


class _OutcomeTable:
    """Computes the rows of one data set and caches the weights that several presets share."""

    def __init__(self, data: AdviceData) -> None:
        self.data = data
        self.observed = data.observed  # computed once for all presets
        self.ratio = {level: data.ratio(level) for level in ("token", *PRODUCTS)}
        self._unbounded: dict[tuple[Objective, float], Tensor] = {}

    def rows(self, name: str) -> Iterator[PresetOutcome]:
        yield self._row(objective(name), {})
        if not bounds_of(name):
            return
        try:
            bounds = calibrated(name, self.observed)
        except TrimtabError:
            return  # Too little data for calibration: only the row of published bounds.
        yield self._row(objective(name, **bounds), bounds)

    def _row(self, built: Objective, bounds: Mapping[str, float]) -> PresetOutcome:
        # Clipping of current/behavior, OPSM and regressions depend on the sign of the advantage.
        depends_on_sign = built.ratio.over == "behavior" or any("advantage" in rule.reads for rule in built.masks)
        signs = (1.0, -1.0) if depends_on_sign and not self.data.known else (1.0,)
        kept, changed, ess, bias = np.mean([self._shares(built, sign) for sign in signs], axis=0).tolist()
        averaged = "the sign of the advantage matters: mean of both where it is unknown or 0" if len(signs) == 2 else ""
        note = "; ".join(filter(None, (NOTES.get(built.name, ""), averaged)))
        return PresetOutcome(built.name, kept, changed, ess, bias, dict(bounds), bool(bounds), note)

    def _shares(self, built: Objective, unknown: float) -> tuple[float, float, float, float]:
        """Returns kept, changed, ess and bias."""
        weight, free = weights(built, self.data, unknown), self._unbounded_weights(built, unknown)
        kept = weight != 0
        changed = kept & ((weight - free).abs() > EQUAL_TOLERANCE * free.abs())
        square = float(weight.square().mean())
        level = built.weight.level if built.weight is not None else built.ratio.level
        if isinstance(built.surrogate, Regression) or level not in PRODUCTS:
            level = "token"
        return (
            float(kept.double().mean()),
            float(changed.double().mean()),
            float(weight.mean().square()) / square if square > 0 else 0.0,
            float((weight - self.ratio[level]).abs().mean()),
        )

    def _unbounded_weights(self, built: Objective, unknown: float) -> Tensor:
        key = unbounded(built), unknown
        if key not in self._unbounded:
            self._unbounded[key] = weights(key[0], self.data, unknown)
        return self._unbounded[key]
