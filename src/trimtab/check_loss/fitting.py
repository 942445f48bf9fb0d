"""The parts of an objective with the bounds that a loss was read to have."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from trimtab.check_loss.differences import kl_form
from trimtab.check_loss.probe_batches import (
    DRIFT,
    DRIFT_ALL,
    DRIFT_FREQUENT,
    DRIFT_LONG,
    DRIFT_MEAN,
    MISMATCH_ALL,
    MISMATCH_MEAN,
    RARE,
    TOKENS,
    Probe,
)
from trimtab.check_loss.readings import Readings
from trimtab.corrections.divergences import per_token
from trimtab.corrections.masks import OPSM, Band, Divergence, Mask, PrefixBudget
from trimtab.corrections.ratios import Ratios
from trimtab.corrections.reduce import Sequences
from trimtab.corrections.weights import Weight
from trimtab.objectives import Aggregation, Objective
from trimtab.objectives.aggregation import AGGREGATION_KINDS
from trimtab.objectives.ratio_bounds import AgedClip, Banded, GrowingClip
from trimtab.objectives.regularizers import KL
from trimtab.objectives.smooth_surrogates import GammaWeight, GeometricClip, QuadraticPenalty, SoftGate
from trimtab.objectives.surrogates import Clipped, Regression, Reinforce, Surrogate

Place = tuple[Probe | None, bool, int]
"""A probe (None: that of the level of the ratio), whether A > 0, and the direction."""
UPPER, LOWER, DUAL = (None, True, 1), (None, False, -1), (None, False, 1)
BOUNDS: dict[type, dict[str, tuple[Place, Callable[[float], float]]]] = {
    Clipped: {"high": (UPPER, math.expm1), "low": (LOWER, lambda x: -math.expm1(x)), "dual": (DUAL, math.exp)},
    AgedClip: {"high": (UPPER, math.expm1), "low": (LOWER, lambda x: -math.expm1(x))},
    Banded: {
        "high": ((DRIFT, True, 1), lambda x: math.expm1(x / 2)),
        "low": ((DRIFT, True, -1), lambda x: -math.expm1(x / 2)),
    },
    GeometricClip: {"high": ((DRIFT, True, 1), lambda x: x), "low": ((DRIFT, False, -1), lambda x: -x)},
    Band: {"max": ((MISMATCH_ALL, True, 1), math.exp), "min": ((MISMATCH_ALL, True, -1), math.exp)},
    OPSM: {"delta": ((MISMATCH_ALL, False, -1), lambda x: -x)},
}
"""Field of a part -> where its bound shows, and the bound that belongs to a bend in nats."""


def fitted(base: Objective, readings: Readings) -> Objective:
    """Returns an objective of the same parts with the bounds of a loss; a part that refuses them stays as it is."""
    fits: dict[str, Callable[[], Any]] = {
        "surrogate": lambda: _surrogate(base, readings),
        "weight": lambda: base.weight and _weight(base.weight, readings),
        "masks": lambda: tuple(_mask(rule, readings) for rule in base.masks),
        "aggregation": lambda: _aggregation(base.aggregation, readings),
        "kl": lambda: _kl(base.surrogate, readings),
    }
    for name, fit in fits.items():
        try:
            base = replace(base, **{name: fit()})
        except (ValueError, OverflowError):
            continue
    return base


def tidy(value: float) -> float:
    """Rounds what is found to 1e-6: 0.2800001 is 0.28."""
    short = float(f"{value:.4g}")
    return short if abs(value - short) <= 2e-6 * abs(value) else float(f"{value:.6g}")


def _bend(readings: Readings, probe: Probe, positive: bool, direction: int) -> float | None:
    """Returns the first sharp bend in nats."""
    bends = readings.bends(probe)[positive, direction]
    return bends[0].x if bends and bends[0].kind in ("zero", "constant", "jump") else None


def _changed(part: Any, found: dict[str, float | None]) -> Any:
    """Returns the part with the fields changed that were found."""
    return replace(part, **{name: tidy(value) for name, value in found.items() if value is not None})


def _bounds(part: Any, readings: Readings, own: Probe, factor: float = 1) -> Any:
    """Returns the part with bounds from `BOUNDS`. own: the probe of its level. factor: tokens that a shift adds up."""
    found: dict[str, float | None] = {}
    for name, ((probe, positive, direction), to_bound) in BOUNDS[type(part)].items():
        x = _bend(readings, probe or own, positive, direction)
        found[name] = None if x is None else to_bound(x * (1 if probe else factor))
    return _changed(part, found)


def _surrogate(base: Objective, readings: Readings) -> Surrogate:
    part, level = base.surrogate, base.ratio.level
    own = DRIFT_ALL if level != "token" else DRIFT_MEAN if base.masks else DRIFT
    factor = TOKENS if level == "sequence" else 1
    if isinstance(part, Clipped):
        part = replace(part, dual=None)
    if type(part) in BOUNDS:
        return _bounds(part, readings, own, factor)
    if isinstance(part, GrowingClip):
        growth = 2**part.power  # at the second token
        places = {"high": (True, 1, 1), "low": (False, -1, -1), "dual": (False, 1, 1)}
        xs = {name: (_bend(readings, DRIFT, *place[:2]), place[2]) for name, place in places.items()}
        return _changed(part, {name: None if x is None else sign * x / growth for name, (x, sign) in xs.items()})
    if isinstance(part, Reinforce):
        # For A < 0 first: an outward mask may hide it for A > 0.
        bends = [bend for positive in (False, True) for bend in readings.bends(own)[positive, 1]]
        constant = [math.exp(factor * bend.x) for bend in bends if bend.kind == "constant"]
        return replace(part, ceiling=tidy(constant[0]) if constant else math.inf)
    return _smooth(part, readings)


def _smooth(part: Surrogate, readings: Readings) -> Surrogate:
    """Fits what has no edges, from a few weights (`SHIFTS`)."""
    curves, found = readings.curves, dict[str, float | None]()
    signs = (("positive", True), ("negative", False))
    if isinstance(part, SoftGate):
        for name, positive in signs:
            weight = float(curves[DRIFT, positive][5]) / math.exp(0.5)
            found[name] = 2 * math.acosh(1 / math.sqrt(weight)) / math.expm1(0.5) if 0 < weight < 1 else None
    elif isinstance(part, GammaWeight):
        rows = [[x, -math.expm1(x)] for x in (-0.1 * TOKENS, 0.1 * TOKENS)]
        for name, positive in signs:
            weights = curves[DRIFT_ALL, positive][3:5]
            if float(weights.min()) > 0:
                k1, k2 = torch.linalg.solve(torch.tensor(rows).double(), weights.log()).tolist()
                found |= {f"k1_{name}": k1, f"k2_{name}": k2}
    elif isinstance(part, QuadraticPenalty):
        excess = math.expm1(0.1)
        short = 1 - float(curves[DRIFT, True][4]) / (1 + excess)
        found["epsilon"] = math.exp(RARE) * excess / short if short > 0 else None
    elif isinstance(part, Regression):
        beta = float(readings.pull[3]) / TOKENS
        found["beta"] = beta if beta > 0 else None
    return _changed(part, found)


def _weight(part: Weight, readings: Readings) -> Weight:
    """Fits the bounds, beyond which a weight is 0 (mask) or constant (truncate, clip)."""
    probe = MISMATCH_MEAN if part.level == "token" else MISMATCH_ALL
    factor = {"token": 1, "sequence": TOKENS, "turn": 2}.get(part.level, 1)
    beyond = "zero" if part.bound == "mask" else "constant"
    found: dict[str, float | None] = {}
    for name, direction in (("max", 1), ("min", -1)):
        bends = [bends[:1] for positive in (True, False) if (bends := readings.bends(probe)[positive, direction])]
        xs = [first.x for (first,) in bends if first.kind == beyond]
        found[name] = math.exp(factor * xs[0]) if xs else None
    if part.bound == "mask" and found["min"] is None:
        found["min"] = 0.0
    return _changed(part, {**found, "min": None} if part.bound == "truncate" else found)


def _mask(rule: Mask, readings: Readings) -> Mask:
    if type(rule) in BOUNDS:
        return _bounds(rule, readings, MISMATCH_ALL)
    if isinstance(rule, PrefixBudget):
        return _budget(rule, readings)
    if not isinstance(rule, Divergence):
        return rule
    of_mean = DRIFT_ALL if rule.over == "current" else MISMATCH_ALL
    probe = {"token": DRIFT_FREQUENT, "max": DRIFT_LONG}.get(rule.reduce, of_mean)
    x = _bend(readings, probe, True, 1)
    return _changed(rule, {"max": None if x is None else _divergence(rule, probe, x)})


def _budget(rule: PrefixBudget, readings: Readings) -> PrefixBudget:
    """Fits bound and smallest weight: the second of n tokens has the weight 1 - (1 - weight_min) / (n - 1)."""
    ends = [_bend(readings, probe, True, 1) for probe in (DRIFT, DRIFT_LONG)]
    if ends[0] is None or ends[1] is None:
        return rule
    short, long = (math.exp(RARE) * math.expm1(x) for x in ends if x is not None)
    n, m = DRIFT.tokens - 1, DRIFT_LONG.tokens - 1
    falls = (short - long) / (short / n - long / m)
    return _changed(rule, {"max": long * (1 - falls / m), "weight_min": 1 - falls})


def _divergence(rule: Divergence, probe: Probe, x: float) -> float:
    """Returns the divergence of a row that a probe shifts by x."""
    batch = {name: value[1:] for name, value in probe.batch(torch.tensor([x]).double(), 1.0).items()}
    ratios = Ratios(torch.where(batch["mask"], batch["current"] - batch["behavior"], 0.0), Sequences(batch["mask"]))
    values = per_token(rule.kind, ratios, batch["behavior"])[batch["mask"]]
    return float({"token": values.max, "max": values.max, "mean": values.mean, "sum": values.sum}[rule.reduce]())


def _aggregation(part: Aggregation, readings: Readings) -> Aggregation:
    """Returns the aggregation of the denominator that was found, with the length of a constant one."""
    kind, factor = readings.aggregation
    if kind.startswith("seq-mean-token-sum") and factor:
        kind = "seq-mean-token-sum" if abs(factor - 1) < 1e-6 else "constant"
    if kind not in AGGREGATION_KINDS:
        return part
    return Aggregation(kind, part.denominator, round(1 / factor) if kind == "constant" else None)


def _kl(surrogate: Surrogate, readings: Readings) -> KL:
    kind, coefficient = kl_form(readings)
    if isinstance(surrogate, Regression):
        coefficient *= 2 * surrogate.beta  # which is its gradient for each unit of A
    return KL(kind, tidy(coefficient)) if kind in ("k1", "k2", "k3", "unbiased") and coefficient > 0 else KL()
