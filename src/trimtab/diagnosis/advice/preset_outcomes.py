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

import numpy as np
from torch import Tensor

from trimtab.diagnosis.advice.applied import Data, unbounded, weights
from trimtab.diagnosis.records import Outcome
from trimtab.errors import TrimtabError
from trimtab.objectives import Objective, Regression, objective, objectives
from trimtab.objectives.calibrate import bounds_of, calibrated

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
