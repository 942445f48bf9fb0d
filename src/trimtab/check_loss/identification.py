"""Finds which objective a loss is: a preset or a composition of parts, with the bounds that were read of the loss."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from itertools import product
from typing import Any

import torch

from trimtab.check_loss import probes
from trimtab.check_loss.differences import KINDS, Comparison, Difference
from trimtab.check_loss.probes import NEGATIVE, POSITIVE, RARE, TOKENS, Probe, of_objective
from trimtab.check_loss.readings import Readings
from trimtab.corrections.divergences import per_token
from trimtab.corrections.masks import OPSM, Band, Divergence, Mask, PrefixBudget
from trimtab.corrections.ratios import Ratios
from trimtab.corrections.reduce import Sequences
from trimtab.corrections.weights import Weight
from trimtab.objectives import Aggregation, Objective
from trimtab.objectives.aggregation import AGGREGATION_KINDS
from trimtab.objectives.keywords import SURROGATES, value_at
from trimtab.objectives.presets import COMPOSED, PRESETS
from trimtab.objectives.ratio import Ratio
from trimtab.objectives.ratio_bounds import GammaWeight, GeometricClip, GrowingClip, QuadraticPenalty, SoftGate
from trimtab.objectives.regularizers import KL
from trimtab.objectives.surrogates import Clipped, LogProb, Regression, Reinforce, Surrogate, Unclipped

NEAREST = 4
"""How many candidates are compared with the loss in full."""
BENDING = (GammaWeight, QuadraticPenalty)
"""Surrogates whose keywords change the exponents near a ratio of 1."""
OUTSIDE = {"kl-padding", "padding", "micro-batches", "scale", "exponent", "nan"}
"""Kinds of differences that stay whatever parts an objective has."""
MINOR = {"unexplained": 0.2, "value": 0.1, "nan": 0.2, "exponent": 0.3, "micro-batches": 0.4, "scale": 0.6}
"""How much a difference counts in `ComparedObjective.distance`. Others count 1 to 2, the first of `KINDS` most."""
SURROGATE_PARTS = (Clipped(), Reinforce(5.0), Unclipped(), LogProb(), SoftGate(), GammaWeight(), GeometricClip())
WEIGHT_BOUNDS = (("truncate", None), ("mask", 0.5), ("clip", 0.5))
"""Kind and lower bound of the weights in compositions."""


@dataclass(frozen=True)
class ComparedObjective:
    """An objective, as settings of `[objective]` in a recipe, and its differences from the loss."""

    settings: tuple[tuple[str, Any], ...]
    differences: tuple[Difference, ...]

    @property
    def name(self) -> str:
        return dict(self.settings)["name"]

    @property
    def lines(self) -> list[str]:
        """The lines of a recipe."""
        return [f"{key} = {_toml(value)}" for key, value in self.settings]

    @property
    def same_parts(self) -> bool:
        """Whether the objective has the parts of the loss: the differences have other reasons."""
        return all(difference.kind in OUTSIDE for difference in self.differences)

    @property
    def distance(self) -> tuple[float, int]:
        """How far it is from the loss: by differences, then by the number of settings."""
        harm = (MINOR.get(d.kind, 2 - KINDS.index(d.kind) / len(KINDS)) for d in self.differences)
        return sum(harm), sum(len(value) if isinstance(value, dict) else 1 for _, value in self.settings)


def identify(readings: Readings) -> list[ComparedObjective]:
    """Returns the nearest objectives, nearest first. No probe tells those without differences from the loss."""
    found = _candidates(readings, (preset.objective for preset in PRESETS.values()))
    if not found[0].same_parts:
        found += _candidates(readings, _compositions(readings))
    return sorted(found, key=lambda candidate: candidate.distance)


def _candidates(readings: Readings, bases: Iterable[Objective]) -> list[ComparedObjective]:
    """Returns the objectives that equal a loss, or else the nearest ones, nearest first, fitted to its bounds."""
    shaped = [fitted(base, readings) if type(base.surrogate) in BENDING else base for base in bases]
    near = sorted(shaped, key=partial(_distance, readings))
    alike = [base for base in near if _distance(readings, base) < 2e-3] or near[:NEAREST]
    found: list[ComparedObjective] = []
    for objective in sorted((fitted(base, readings) for base in alike), key=partial(_gap, readings)):
        if _gap(readings, objective) > 1e-8 and (len(found) >= NEAREST or any(c.same_parts for c in found)):
            break
        differences = tuple(Comparison(readings, reference(objective), objective.name).differences())
        found.append(ComparedObjective(settings_of(objective), differences))
    return sorted(found, key=lambda candidate: candidate.distance)


def reference(objective: Objective) -> Readings:
    """Returns the readings of an objective. Objectives of equal parts share them."""
    return _readings(replace(objective, name="objective", advantage="grpo", notes=()))


@lru_cache(maxsize=256)
def _readings(objective: Objective) -> Readings:
    return Readings(of_objective(objective))


def _distance(readings: Readings, base: Objective) -> float:
    """Returns the largest difference of the local exponents."""
    return max(abs(readings.exponents[key] - value) for key, value in reference(base).exponents.items())


def _gap(readings: Readings, objective: Objective) -> float:
    """Returns the largest difference of gradients, scaled to norm 1, on random batches: cheaper than `Comparison`."""
    pairs = zip(readings.random, reference(objective).random, strict=True)
    units = [[read.gradient / read.gradient.norm().clamp(min=1e-12) for read in pair] for pair in pairs]
    return max(float((a - b).nan_to_num(1.0).abs().max()) for a, b in units)


def _compositions(readings: Readings) -> Iterator[Objective]:
    """Yields objectives that no preset is, of parts that go together, at the level that was read of the loss."""
    weights: list[Weight | None] = [None]
    if any(readings.bends(probes.MISMATCH).values()) or abs(readings.exponent(True, "behavior")) > 1e-3:
        weights += [Weight(level, kind, low, 2.0) for level in ("token", "sequence") for kind, low in WEIGHT_BOUNDS]
    for over, surrogate in product(("proximal", "behavior"), SURROGATE_PARTS):
        for weight in weights if over == "proximal" else weights[:1]:
            parts = {"ratio": Ratio(readings.level(), over), "surrogate": surrogate, "weight": weight}
            try:
                yield replace(COMPOSED.objective, **parts)
            except ValueError:
                continue  # parts that do not go together


def settings_of(objective: Objective) -> tuple[tuple[str, Any], ...]:
    """Returns the settings of `[objective]` in a recipe: the name, and the values that are not its defaults."""
    preset = PRESETS.get(objective.name, COMPOSED)
    if preset.defaults.get("clip_dual") is not None and value_at(objective, "surrogate.dual") is None:
        preset = COMPOSED  # no keyword takes the dual clip out of a preset
    values = {key: value_at(objective, path) for key, path in preset.paths.items()}
    changed = [(key, value) for key, value in values.items() if value not in (None, preset.defaults[key])]
    if preset is not COMPOSED:
        return (("name", objective.name), *changed)
    kind = next(name for name, kind in SURROGATES.items() if type(objective.surrogate) is kind)
    tables = {"ratio": _table(objective.ratio), "surrogate": {"kind": kind, **_table(objective.surrogate)}}
    tables |= {} if objective.weight is None else {"weight": _table(objective.weight)}
    return (("name", COMPOSED.objective.name), *tables.items(), *changed)


def _table(part: Any) -> dict[str, Any]:
    values = {item.name: getattr(part, item.name) for item in fields(part)}
    return {name: value for name, value in values.items() if value is not None and value is not False}


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + "}"
    return f"{value:.6g}" if isinstance(value, float) else json.dumps(value)


SIDES: dict[str, tuple[bool, int]] = {"high": (True, 1), "low": (False, -1), "dual": (False, 1)}
SIDES |= {"max": (True, 1), "min": (True, -1), "delta": (False, -1)}
"""Field of a part that is a bound -> sign of A (whether A > 0) and direction from 1 in which it is reached."""
OF_LOGS = (GrowingClip, GeometricClip, OPSM)
"""Parts whose bounds are on the log of a ratio."""


def fitted(base: Objective, readings: Readings) -> Objective:
    """Returns an objective of the same parts with the bounds of a loss. A part that refuses them stays as it is."""
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
        except (ValueError, ArithmeticError):
            continue
    return base


def tidy(value: float) -> float:
    """Returns a value rounded to a relative 1e-6: 0.2800001 is 0.28."""
    short = float(f"{value:.4g}")
    return short if abs(value - short) <= 2e-6 * abs(value) else float(f"{value:.6g}")


def _bend(readings: Readings, probe: Probe, positive: bool, direction: int) -> float:
    """Returns the log-ratio of the first bend; NaN without bend, and if the first one is smooth."""
    bends = readings.bends(probe)[positive, direction]
    return bends[0].x if bends and bends[0].kind in ("zero", "constant", "jump") else math.nan


def _changed(part: Any, found: Mapping[str, float]) -> Any:
    """Returns the part with the values that were found. NaN is not found."""
    return replace(part, **{name: tidy(value) for name, value in found.items() if not math.isnan(value)})


def _bounds(part: Any, readings: Readings, probe: Probe, factor: float = 1) -> Any:
    """Returns the part with the bounds that a probe shows. factor: tokens over which the ratio adds up a shift."""
    found: dict[str, float] = {}
    for name in SIDES.keys() & {item.name for item in fields(part)}:
        if name == "dual" or getattr(part, name) is not None:
            x = factor * _bend(readings, probe, *SIDES[name])
            of_ratio = abs(math.expm1(x)) if name in ("high", "low") else math.exp(x)
            found[name] = abs(x) if isinstance(part, OF_LOGS) else of_ratio
    return _changed(part, found)


def _surrogate(base: Objective, readings: Readings) -> Surrogate:
    part, level = base.surrogate, base.ratio.level
    own = probes.DRIFT_ALL if level != "token" else probes.DRIFT_MEAN if base.masks else probes.DRIFT
    factor = TOKENS if level == "sequence" else 1
    if isinstance(part, Reinforce):
        # A < 0 first: for A > 0, an outward mask may hide the ceiling.
        bends = [bend for positive in (False, True) for bend in readings.bends(own)[positive, 1]]
        constant = [math.exp(factor * bend.x) for bend in bends if bend.kind == "constant"]
        return replace(part, ceiling=tidy(constant[0]) if constant else math.inf)
    if isinstance(part, OF_LOGS):  # at the second token
        return _bounds(part, readings, probes.DRIFT, 2 ** -getattr(part, "power", 0))
    if isinstance(part, Clipped):
        part = replace(part, dual=None)
    return _smooth(_bounds(part, readings, own, factor), readings)


def _smooth(part: Surrogate, readings: Readings) -> Surrogate:
    """Returns the surrogate with the parameters that bend nothing, computed from a few weights."""
    found: dict[str, float] = {}
    for name, advantage in (("positive", POSITIVE), ("negative", NEGATIVE)):
        if isinstance(part, SoftGate):
            weight = float(readings.weights(probes.DRIFT, torch.tensor([0.5]).double(), advantage)) / math.exp(0.5)
            found[name] = 2 * math.acosh(1 / math.sqrt(weight)) / math.expm1(0.5)
        elif isinstance(part, GammaWeight):
            shifts = torch.tensor([-0.1, 0.1]).double()
            rows = torch.stack([TOKENS * shifts, -torch.expm1(TOKENS * shifts)], 1)
            powers = torch.linalg.solve(rows, readings.weights(probes.DRIFT_ALL, shifts, advantage).log())
            found |= zip((f"k1_{name}", f"k2_{name}"), powers.tolist(), strict=True)
    if isinstance(part, QuadraticPenalty):
        weight = float(readings.weights(probes.DRIFT, torch.tensor([0.25]).double(), POSITIVE))
        excess = math.expm1(0.25)
        found["epsilon"] = math.exp(RARE) * excess / (1 - weight / (1 + excess))
    elif isinstance(part, Regression):
        found["beta"] = float(readings.gradient_change_at_zero_advantage[3]) / TOKENS
    return _changed(part, found)


def _weight(part: Weight, readings: Readings) -> Weight:
    """Returns the weight with the bounds that were read. A mask gets no lower bound if none was read."""
    probe = probes.MISMATCH_MEAN if part.level == "token" else probes.MISMATCH_ALL
    factor = {"token": 1, "sequence": TOKENS, "turn": 2}.get(part.level, 1)
    return _bounds(replace(part, min=0.0) if part.bound == "mask" else part, readings, probe, factor)


def _mask(rule: Mask, readings: Readings) -> Mask:
    if isinstance(rule, Band | OPSM):
        return _bounds(rule, readings, probes.MISMATCH_ALL)
    if isinstance(rule, PrefixBudget):
        # The second of n tokens has the weight 1 - (1 - weight_min) / (n - 1).
        ends = {probe.tokens - 1: _bend(readings, probe, True, 1) for probe in (probes.DRIFT, probes.DRIFT_LONG)}
        (n, short), (m, long) = ((n, math.exp(RARE) * math.expm1(x)) for n, x in ends.items())
        falls = (short - long) / (short / n - long / m)
        return _changed(rule, {"max": long * (1 - falls / m), "weight_min": 1 - falls})
    if not isinstance(rule, Divergence):
        return rule
    of_mean = probes.DRIFT_ALL if rule.over == "current" else probes.MISMATCH_ALL
    probe = {"token": probes.DRIFT_FREQUENT, "max": probes.DRIFT_LONG}.get(rule.reduce, of_mean)
    # The divergence of a row that is shifted up to the bend.
    batch = probe.batch(torch.tensor([_bend(readings, probe, True, 1)]).double(), 1.0)
    log, mask = (batch["current"] - batch["behavior"])[1:], batch["mask"][1:]
    ratios = Ratios(torch.where(mask, log, 0.0), Sequences(mask))
    values = per_token(rule.kind, ratios, batch["behavior"][1:])[mask]
    reduced = {"token": values.max, "max": values.max, "mean": values.mean, "sum": values.sum}[rule.reduce]
    return _changed(rule, {"max": float(reduced())})


def _aggregation(part: Aggregation, readings: Readings) -> Aggregation:
    """Returns the aggregation of the denominator that was read, with the length of a constant denominator."""
    kind, factor = readings.aggregation
    if kind.startswith("seq-mean-token-sum") and factor:
        kind = "seq-mean-token-sum" if abs(factor - 1) < 1e-6 else "constant"
    if kind not in AGGREGATION_KINDS:
        return part
    return Aggregation(kind, part.denominator, round(1 / factor) if kind == "constant" else None)


def _kl(surrogate: Surrogate, readings: Readings) -> KL:
    kind, coefficient = readings.kl_form
    if isinstance(surrogate, Regression):
        coefficient *= 2 * surrogate.beta  # the gradient of a regression for each unit of A
    return KL(kind, tidy(coefficient)) if kind in ("k1", "k2", "k3", "unbiased") and coefficient > 0 else KL()
