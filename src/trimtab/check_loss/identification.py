"""Which objective a loss is: presets and compositions of parts, with the bounds that were found."""

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
from trimtab.objectives.policies import Ratio
from trimtab.objectives.presets import COMPOSED, PRESETS
from trimtab.objectives.ratio_bounds import GrowingClip
from trimtab.objectives.regularizers import KL
from trimtab.objectives.smooth_surrogates import GammaWeight, GeometricClip, QuadraticPenalty, SoftGate
from trimtab.objectives.surrogates import Clipped, LogProb, Regression, Reinforce, Surrogate, Unclipped

NEAREST = 4
"""Candidates of which every difference is found."""
BENDING = (GammaWeight, QuadraticPenalty)
"""Surrogates whose keywords change the exponents near a ratio of 1."""
OUTSIDE = {"kl-padding", "padding", "micro-batches", "scale", "exponent", "nan"}
"""Differences that other parts would not remove."""
MINOR = {"unexplained": 0.2, "value": 0.1, "nan": 0.2, "exponent": 0.3, "micro-batches": 0.4, "scale": 0.6}
"""How much a difference of a kind counts; all others count 1 and more, the more the earlier in `KINDS`."""
SURROGATE_PARTS = (Clipped(), Reinforce(5.0), Unclipped(), LogProb(), SoftGate(), GammaWeight(), GeometricClip())
WEIGHT_BOUNDS = (("truncate", None), ("mask", 0.5), ("clip", 0.5))
"""Kind and lower bound."""


@dataclass(frozen=True)
class Candidate:
    """An objective with the bounds of a loss, by the keys of `[objective]` in a recipe. differences: what is left."""

    settings: tuple[tuple[str, Any], ...]
    differences: tuple[Difference, ...]

    @property
    def name(self) -> str:
        return dict(self.settings)["name"]

    @property
    def lines(self) -> list[str]:
        """Lines of a recipe."""
        return [f"{key} = {_toml(value)}" for key, value in self.settings]

    @property
    def same_parts(self) -> bool:
        """Whether what is left is no matter of parts."""
        return all(one.kind in OUTSIDE for one in self.differences)

    @property
    def distance(self) -> tuple[float, int]:
        """By what differs, then by the number of settings."""
        harm = (MINOR.get(one.kind, 2 - KINDS.index(one.kind) / len(KINDS)) for one in self.differences)
        return sum(harm), sum(len(value) if isinstance(value, dict) else 1 for _, value in self.settings)


def identify(readings: Readings) -> list[Candidate]:
    """Returns the nearest objectives, nearest first; those without a difference are the loss, as far as probes tell."""
    found = _candidates(readings, (preset.objective for preset in PRESETS.values()))
    if not found[0].same_parts:
        found += _candidates(readings, _compositions(readings))
    return sorted(found, key=lambda one: one.distance)


def _candidates(readings: Readings, bases: Iterable[Objective]) -> list[Candidate]:
    """Returns what is equal, or else the nearest, nearest first."""
    shaped = [fitted(base, readings) if type(base.surrogate) in BENDING else base for base in bases]
    near = sorted(shaped, key=partial(_distance, readings))
    alike = [base for base in near if _distance(readings, base) < 2e-3] or near[:NEAREST]
    found: list[Candidate] = []
    for objective in sorted((fitted(base, readings) for base in alike), key=partial(_gap, readings)):
        if _gap(readings, objective) > 1e-8 and (len(found) >= NEAREST or any(one.same_parts for one in found)):
            break
        differences = tuple(Comparison(readings, reference(objective), objective.name).differences())
        found.append(Candidate(settings_of(objective), differences))
    return sorted(found, key=lambda one: one.distance)


def reference(objective: Objective) -> Readings:
    """Returns the readings of an objective, the same ones for all of equal parts."""
    return _readings(replace(objective, name="objective", advantage="grpo", notes=()))


@lru_cache(maxsize=256)
def _readings(objective: Objective) -> Readings:
    return Readings(of_objective(objective))


def _distance(readings: Readings, base: Objective) -> float:
    """Returns the largest difference of the local exponents."""
    return max(abs(readings.exponents[key] - value) for key, value in reference(base).exponents.items())


def _gap(readings: Readings, objective: Objective) -> float:
    """Returns how far gradients are apart on random batches, whatever their size: cheaper than all differences."""
    pairs = zip(readings.random, reference(objective).random, strict=True)
    units = [[one.gradient / one.gradient.norm().clamp(min=1e-12) for one in pair] for pair in pairs]
    return max(float((a - b).nan_to_num(1.0).abs().max()) for a, b in units)


def _compositions(readings: Readings) -> Iterator[Objective]:
    """Objectives of parts, at the level that was read: what no preset combines."""
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
    """Returns the keys of `[objective]` in a recipe: the name, and what differs from its defaults."""
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
"""Field of a part that is a bound -> whether A > 0, and the direction in which it shows."""
OF_LOGS = (GrowingClip, GeometricClip, OPSM)
"""Parts whose bounds are on the log of a ratio."""


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
        except (ValueError, ArithmeticError):
            continue
    return base


def tidy(value: float) -> float:
    """Rounds what is found to 1e-6: 0.2800001 is 0.28."""
    short = float(f"{value:.4g}")
    return short if abs(value - short) <= 2e-6 * abs(value) else float(f"{value:.6g}")


def _bend(readings: Readings, probe: Probe, positive: bool, direction: int) -> float:
    """Returns the first sharp bend in nats, NaN without one."""
    bends = readings.bends(probe)[positive, direction]
    return bends[0].x if bends and bends[0].kind in ("zero", "constant", "jump") else math.nan


def _changed(part: Any, found: Mapping[str, float]) -> Any:
    """Returns the part with the fields changed that were found, which are not NaN."""
    return replace(part, **{name: tidy(value) for name, value in found.items() if not math.isnan(value)})


def _bounds(part: Any, readings: Readings, probe: Probe, factor: float = 1) -> Any:
    """Returns the part with the bounds that a probe shows. factor: tokens that a shift adds up."""
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
        # For A < 0 first: an outward mask may hide it for A > 0.
        bends = [bend for positive in (False, True) for bend in readings.bends(own)[positive, 1]]
        constant = [math.exp(factor * bend.x) for bend in bends if bend.kind == "constant"]
        return replace(part, ceiling=tidy(constant[0]) if constant else math.inf)
    if isinstance(part, OF_LOGS):  # at the second token
        return _bounds(part, readings, probes.DRIFT, 2 ** -getattr(part, "power", 0))
    if isinstance(part, Clipped):
        part = replace(part, dual=None)
    return _smooth(_bounds(part, readings, own, factor), readings)


def _smooth(part: Surrogate, readings: Readings) -> Surrogate:
    """Fits what has no edges, from a few weights."""
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
        weight, excess = (
            float(readings.weights(probes.DRIFT, torch.tensor([0.25]).double(), POSITIVE)),
            math.expm1(0.25),
        )
        found["epsilon"] = math.exp(RARE) * excess / (1 - weight / (1 + excess))
    elif isinstance(part, Regression):
        found["beta"] = float(readings.pull[3]) / TOKENS
    return _changed(part, found)


def _weight(part: Weight, readings: Readings) -> Weight:
    """A mask that shows no lower bound has none."""
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
    # The divergence of a row that is shifted as far.
    batch = probe.batch(torch.tensor([_bend(readings, probe, True, 1)]).double(), 1.0)
    log, mask = (batch["current"] - batch["behavior"])[1:], batch["mask"][1:]
    ratios = Ratios(torch.where(mask, log, 0.0), Sequences(mask))
    values = per_token(rule.kind, ratios, batch["behavior"][1:])[mask]
    reduced = {"token": values.max, "max": values.max, "mean": values.mean, "sum": values.sum}[rule.reduce]
    return _changed(rule, {"max": float(reduced())})


def _aggregation(part: Aggregation, readings: Readings) -> Aggregation:
    """Returns the aggregation of the denominator that was found, with the length of a constant one."""
    kind, factor = readings.aggregation
    if kind.startswith("seq-mean-token-sum") and factor:
        kind = "seq-mean-token-sum" if abs(factor - 1) < 1e-6 else "constant"
    if kind not in AGGREGATION_KINDS:
        return part
    return Aggregation(kind, part.denominator, round(1 / factor) if kind == "constant" else None)


def _kl(surrogate: Surrogate, readings: Readings) -> KL:
    kind, coefficient = readings.kl_form
    if isinstance(surrogate, Regression):
        coefficient *= 2 * surrogate.beta  # which is its gradient for each unit of A
    return KL(kind, tidy(coefficient)) if kind in ("k1", "k2", "k3", "unbiased") and coefficient > 0 else KL()
