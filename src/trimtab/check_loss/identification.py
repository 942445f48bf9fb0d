"""Which objective a loss is: presets and compositions of parts, with the bounds that were found."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import product
from typing import Any

from trimtab.check_loss.differences import KINDS, find_differences, level_of
from trimtab.check_loss.fitting import fitted
from trimtab.check_loss.loss_answer import Difference
from trimtab.check_loss.loss_function import of_objective
from trimtab.check_loss.probe_batches import MISMATCH
from trimtab.check_loss.readings import Readings
from trimtab.corrections.weights import Weight
from trimtab.objectives import Objective
from trimtab.objectives.keywords import SURROGATES, value_at
from trimtab.objectives.policies import Ratio
from trimtab.objectives.presets import COMPOSED, PRESETS
from trimtab.objectives.smooth_surrogates import GammaWeight, GeometricClip, QuadraticPenalty, SoftGate
from trimtab.objectives.surrogates import Clipped, LogProb, Reinforce, Surrogate, Unclipped

NEAREST = 4
"""Candidates of which every difference is found."""
BENDING = (GammaWeight, QuadraticPenalty)
"""Surrogates whose keywords change the exponents near a ratio of 1."""
OUTSIDE = {"kl-padding", "padding", "micro-batches", "scale", "exponent", "nan"}
"""Differences that other parts would not remove."""
MINOR = {"unexplained": 0.2, "value": 0.1, "nan": 0.2, "exponent": 0.3, "micro-batches": 0.4, "scale": 0.6}
"""How much a difference of a kind counts; all others count 1 and more, the more the earlier in `KINDS`."""


@dataclass(frozen=True)
class Candidate:
    """An objective with the bounds of a loss. differences: what is left. settings: lines of a recipe."""

    objective: Objective
    differences: tuple[Difference, ...]
    settings: tuple[tuple[str, Any], ...]

    @property
    def same_parts(self) -> bool:
        """Whether what is left is no matter of parts."""
        return all(one.kind in OUTSIDE for one in self.differences)

    @property
    def distance(self) -> float:
        order = list(KINDS)
        return sum(MINOR.get(one.kind, 2 - order.index(one.kind) / len(order)) for one in self.differences)


def identify(readings: Readings) -> list[Candidate]:
    """Returns the nearest objectives, nearest first; those without a difference are the loss, as far as probes tell."""
    found = _candidates(readings, (preset.objective for preset in PRESETS.values()))
    if not found or not found[0].same_parts:
        found += _candidates(readings, _compositions(readings))
    return sorted(found, key=_order)


def _candidates(readings: Readings, bases: Iterable[Objective]) -> list[Candidate]:
    """Returns what is equal, or else the nearest, nearest first."""
    shaped = [fitted(base, readings) if type(base.surrogate) in BENDING else base for base in bases]
    near = sorted(
        ((_distance(readings, base), number, base) for number, base in enumerate(shaped)), key=lambda one: one[:2]
    )
    alike = [base for gap, _, base in near if gap < 2e-3] or [base for _, _, base in near[:NEAREST]]
    ranked = []
    for number, base in enumerate(alike):
        objective = fitted(base, readings)
        ranked.append((_gap(readings, reference(objective)), number, objective))
    found: list[Candidate] = []
    for gap, _, objective in sorted(ranked, key=lambda one: one[:2]):
        if gap > 1e-8 and (len(found) >= NEAREST or any(one.same_parts for one in found)):
            break
        differences = tuple(find_differences(readings, reference(objective), objective.name))
        found.append(Candidate(objective, differences, settings_of(objective)))
    return sorted(found, key=_order)


def _order(candidate: Candidate) -> tuple[float, int]:
    """By what differs, then by the number of settings."""
    tables = (len(value) if isinstance(value, dict) else 1 for _, value in candidate.settings)
    return candidate.distance, sum(tables)


def reference(objective: Objective) -> Readings:
    """Returns the readings of an objective, the same ones for all of equal parts."""
    return _readings(replace(objective, name="objective", advantage="grpo", notes=()))


@lru_cache(maxsize=256)
def _readings(objective: Objective) -> Readings:
    return Readings(of_objective(objective))


def _distance(readings: Readings, base: Objective) -> float:
    """Returns the largest difference of the local exponents."""
    expected = reference(base).exponents
    return max(abs(readings.exponents[key] - value) for key, value in expected.items())


def _gap(mine: Readings, theirs: Readings) -> float:
    """Returns how far gradients are apart on random batches, whatever their size: cheaper than all differences."""
    pairs = [(a.gradient, b.gradient) for a, b in zip(mine.random, theirs.random, strict=True)]
    scaled = [(a / a.norm().clamp(min=1e-12), b / b.norm().clamp(min=1e-12)) for a, b in pairs]
    return max(float((a - b).nan_to_num(1.0).abs().max()) for a, b in scaled)


def _compositions(readings: Readings) -> Iterator[Objective]:
    """Objectives of parts, at the level that was read: what no preset combines."""
    level, weights = level_of(readings), [None]
    if any(readings.bends(MISMATCH).values()) or abs(readings.exponent(True, "behavior")) > 1e-3:
        weights += [Weight(kind, bound, low, 2.0) for kind in ("token", "sequence") for bound, low in _BOUNDS]
    for over, surrogate in product(("proximal", "behavior"), SURROGATE_PARTS):
        for weight in weights if over == "proximal" else weights[:1]:
            parts = {"ratio": Ratio(level, over), "surrogate": surrogate, "weight": weight}
            try:
                yield replace(COMPOSED.objective, **parts)
            except ValueError:
                continue  # parts that do not go together


SURROGATE_PARTS = (Clipped(), Reinforce(5.0), Unclipped(), LogProb(), SoftGate(), GammaWeight(), GeometricClip())
_BOUNDS = (("truncate", None), ("mask", 0.5), ("clip", 0.5))


def settings_of(objective: Objective) -> tuple[tuple[str, Any], ...]:
    """Returns the keys of `[objective]` in a recipe: the name, and what differs from its defaults."""
    preset = PRESETS.get(objective.name)
    if preset is not None:
        values = {key: value_at(objective, path) for key, path in preset.paths.items()}
        changed = [(key, value) for key, value in values.items() if value not in (None, preset.defaults[key])]
        if preset.defaults.get("clip_dual") is not None and value_at(objective, "surrogate.dual") is None:
            changed.append(("surrogate", {"kind": _kind(objective.surrogate), **_table(objective.surrogate)}))
            changed = [(key, value) for key, value in changed if not preset.paths.get(key, "").startswith("surrogate.")]
        return (("name", objective.name), *changed)
    tables: list[tuple[str, Any]] = [("name", "composed"), ("ratio", _table(objective.ratio))]
    tables.append(("surrogate", {"kind": _kind(objective.surrogate), **_table(objective.surrogate)}))
    if objective.weight is not None:
        tables.append(("weight", _table(objective.weight)))
    aggregation = objective.aggregation
    tables += [("aggregation", aggregation.kind)] if aggregation.kind != "token-mean" else []
    tables += [("length_max", aggregation.length_max)] if aggregation.length_max is not None else []
    tables += [("kl", objective.kl.kind), ("kl_coef", objective.kl.coef)] if objective.kl.coef else []
    return tuple(tables)


def _kind(part: Surrogate) -> str:
    return next(name for name, kind in SURROGATES.items() if type(part) is kind)


def _table(part: Any) -> dict[str, Any]:
    values = {item.name: getattr(part, item.name) for item in fields(part)}
    return {name: value for name, value in values.items() if value is not None and value is not False}
