"""The effect of each preset on the data at its first update: shares of tokens kept, clipped and weighted.

w_t is the applied weight of trained token t: its gradient under the preset's loss, divided by the gradient that it
would have if trainer and sampler were equal (docs/reference-choosing.md):

    kept     share of t with w_t != 0
    changed  share of t with w_t != 0 that differs from the weight without any bound
    ess      (sum w)^2 / (n sum w^2), with w = 0 for rejected tokens
    bias     mean_t |w_t - rho_t|, rho_t at the level of the preset's weight (token, or product over response or turn)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimtab.corrections.ratios import PRODUCT_LEVELS, at_level, bounded, log_ratio
from trimtab.diagnosis.records import PresetOutcome, read_table
from trimtab.diagnosis.tokens import TokenTable
from trimtab.errors import TrimtabError
from trimtab.objectives import Aggregation, Objective, PolicyLogps, Regression, objective, objectives
from trimtab.objectives.calibrate import Observed, bounds_of, calibrated

EQUAL_TOLERANCE = 1e-5  # relative difference up to which two float32 weights count as equal

NOTES = read_table("texts.toml")["presets"]
"""What the outcome of a preset assumes."""


@dataclass(frozen=True, eq=False)
class AdviceData:
    """All responses as one batch, packed into one row (1, tokens)."""

    logps: PolicyLogps  # the current policy is the proximal policy
    sign: Tensor  # (1, tokens): sign of the advantage; 0 if unknown

    @classmethod
    def of(cls, table: TokenTable) -> AdviceData:
        table = table.select(table.lengths > 0)
        sign = np.zeros(table.responses) if table.advantage is None else np.sign(np.nan_to_num(table.advantage))
        columns = (table.trainer, table.behavior, table.mask, table.row, table.turn_number)
        trainer, behavior, mask, row, turn = (torch.from_numpy(np.array(values))[None] for values in columns)
        logps = PolicyLogps(
            current=trainer,
            behavior=behavior,
            mask=mask,
            proximal=trainer,
            off_policy=torch.zeros_like(mask),
            sequence_ids=row,
            turn=turn,
            age=torch.ones_like(turn),
        )
        return cls(logps, torch.from_numpy(table.at_tokens(sign).astype(np.float32))[None])

    @property
    def trained(self) -> int:
        """The number of trained tokens."""
        return int(self.logps.mask.sum())

    @cached_property
    def observed(self) -> Observed:
        """The samples that bounds are calibrated from."""
        logps = self.logps
        return Observed.of(*self._sides, logps.mask, logps.sequence_ids, logps.turn)

    @cached_property
    def ratios(self) -> Mapping[str, Tensor]:
        """Ratios of trained tokens (trained,), float64, by level: of the token, or of its turn or response."""
        mask, sequences = self.logps.mask, self.logps.sequences
        log = log_ratio(*self._sides, mask)
        levels = ("token", *PRODUCT_LEVELS)
        return {level: bounded(at_level(log, sequences, level))[mask].exp().double() for level in levels}

    @cached_property
    def free_weights(self) -> Callable[[Objective, float], Tensor]:
        """`weights` of objectives without bounds, each computed once: many presets are equal without their bounds."""
        return cache(lambda built, unknown: weights(built, self, unknown))

    @property
    def _sides(self) -> tuple[Tensor, Tensor]:
        return self.logps.required("proximal", "advice"), self.logps.required("behavior", "advice")


def weights(built: Objective, data: AdviceData, unknown: float) -> Tensor:
    """Returns the applied weight of every trained token (trained,), float64, at the first update on the data.

    At this update the current policy equals the proximal policy. So the weight is d loss / d log pi, divided by the
    advantage and by the gradient of a single token with equal policies. `unknown`: +1 or -1, the sign used if an
    advantage is 0 or unknown.
    """
    plain = _without_shared_factors(built)
    return _gradients(plain, data, unknown) * data.trained / _of_one_token(plain)


def _gradients(built: Objective, data: AdviceData, unknown: float) -> Tensor:
    """Returns d loss / d log pi, times the sign of the advantage, of every trained token (trained,), float64."""
    current = data.logps.required("current", "advice").clone().requires_grad_()
    sign = torch.where(data.sign == 0, unknown, data.sign)
    (gradient,) = torch.autograd.grad(built(replace(data.logps, current=current), sign).loss, current)
    return (gradient * sign)[data.logps.mask].double()


@lru_cache(maxsize=256)
def _of_one_token(built: Objective) -> Tensor:
    """Returns the gradient (1,) of a single token that has the same log-prob under both policies."""
    logp = np.full(1, -1.0, dtype=np.float32)
    table = TokenTable(np.array([0, 1]), np.ones(1, dtype=np.bool_), logp, proximal=logp)
    return _gradients(built, AdviceData.of(table), 1.0)


def remove_bounds(built: Objective) -> Objective:
    """Returns the objective without bounds, masks and clipping: equal for presets that differ only in these."""
    weight = None if built.weight is None else replace(built.weight, bound="truncate", min=None, max=None)
    return _without_shared_factors(replace(built, weight=weight, masks=(), surrogate=built.surrogate.unbounded()))


def _without_shared_factors(built: Objective) -> Objective:
    """Returns the objective without the parts that do not change weights, such as factors shared by all tokens."""
    return replace(built, name="plain", aggregation=Aggregation(), notes=())


def rate_presets(data: AdviceData, presets: Sequence[str] = ()) -> tuple[PresetOutcome, ...]:
    """Returns one row per preset, followed by one with calibrated bounds if it has any.

    Empty without a trained token. presets: by default all presets whose weights follow from the log-probs of sampled
    tokens, since files contain no others.
    """
    if data.trained == 0:
        return ()
    rated = presets or [name for name in objectives() if not objective(name).centering]
    return tuple(
        rate_preset(data, name, bounds, calibrated=bool(bounds)) for name in rated for bounds in _bounds(data, name)
    )


def _bounds(data: AdviceData, preset: str) -> Iterator[Mapping[str, Any]]:
    """Yields no overrides (published bounds), then bounds from the data if the preset has any and data suffices."""
    yield {}
    if bounds_of(preset):
        try:
            yield calibrated(preset, data.observed)
        except TrimtabError:  # too little data
            return


def rate_preset(data: AdviceData, preset: str, bounds: Mapping[str, Any], *, calibrated: bool = False) -> PresetOutcome:
    """Returns the row of one preset. calibrated: whether the bounds are quantiles of the data."""
    built = objective(preset, **bounds)
    # Clipping of current/behavior, OPSM and regressions depend on the sign of the advantage.
    depends_on_sign = built.ratio.over == "behavior" or any("advantage" in rule.reads for rule in built.masks)
    signs = (1.0, -1.0) if depends_on_sign and (data.sign == 0).any() else (1.0,)
    shares = [_shares(built, data, sign) for sign in signs]
    kept, changed, ess, bias = np.mean(shares, axis=0).tolist()
    averaged = "the sign of the advantage matters: mean of both where it is unknown or 0" if len(signs) == 2 else ""
    note = "; ".join(filter(None, (NOTES.get(preset, ""), averaged)))
    return PresetOutcome(preset, kept, changed, ess, bias, dict(bounds), calibrated, note)


def _shares(built: Objective, data: AdviceData, unknown: float) -> tuple[float, float, float, float]:
    """Returns kept, changed, ess and bias."""
    weight, free = weights(built, data, unknown), data.free_weights(remove_bounds(built), unknown)
    kept = weight != 0
    changed = kept & ((weight - free).abs() > EQUAL_TOLERANCE * free.abs())
    square = float(weight.square().mean())
    level = built.weight.level if built.weight is not None else built.ratio.level
    if isinstance(built.surrogate, Regression) or level not in PRODUCT_LEVELS:
        level = "token"
    return (
        float(kept.double().mean()),
        float(changed.double().mean()),
        float(weight.mean().square()) / square if square > 0 else 0.0,
        float((weight - data.ratios[level]).abs().mean()),
    )
