"""Parts of an objective given as tables, as in a recipe: `ratio`, `surrogate`, `weight`, `mask`, `centering`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from numbers import Integral, Real
from typing import Any, get_args, get_type_hints

from trimtab.corrections.divergences import DIVERGENCES
from trimtab.corrections.masks import OPSM, Band, Divergence, Mask, Veto
from trimtab.corrections.prefix_budget import PrefixBudget
from trimtab.corrections.weights import Weight
from trimtab.errors import TrimtabError, did_you_mean
from trimtab.objectives.objective import Objective
from trimtab.objectives.policies import Ratio
from trimtab.objectives.ratio_bounds import AgedClip, Banded, GrowingClip
from trimtab.objectives.second_moment import SecondMoment
from trimtab.objectives.smooth_surrogates import GammaWeight, GeometricClip, QuadraticPenalty, SoftGate
from trimtab.objectives.surrogate import Surrogate
from trimtab.objectives.surrogates import Clipped, LogProb, Regression, Reinforce, Shaped, Unclipped

PART_KEYS = ("ratio", "surrogate", "weight", "mask", "centering")

SURROGATES: dict[str, type[Surrogate]] = {
    "clipped": Clipped,
    "reinforce": Reinforce,
    "unclipped": Unclipped,
    "log-prob": LogProb,
    "regression": Regression,
    "shaped": Shaped,
    "second-moment": SecondMoment,
    "growing-clip": GrowingClip,
    "banded": Banded,
    "aged-clip": AgedClip,
    "soft-gate": SoftGate,
    "gamma-weight": GammaWeight,
    "geometric-clip": GeometricClip,
    "quadratic-penalty": QuadraticPenalty,
}

MASKS: dict[str, type[Mask]] = {
    "band": Band,
    **dict.fromkeys(DIVERGENCES, Divergence),
    "veto": Veto,
    "opsm": OPSM,
    "prefix-budget": PrefixBudget,
}
"""By `kind`; that of a divergence is which one."""


def parse_parts(base: Objective, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of `Objective` that given parts replace, and in `masks` those to add to the base's own.

    given: by name in `PART_KEYS`, each a table of the part's fields, with `kind` for surrogates and masks, or the part
        itself; `mask` is a list and `centering` a bool. `advantage` beside them is a kind.
    Raises `TrimtabError` for unknown names and wrong types.
    """
    built = {}
    if "ratio" in given:
        built["ratio"] = _parse_part("ratio", Ratio, given["ratio"])
    if "surrogate" in given:
        built["surrogate"] = _parse_kind("surrogate", SURROGATES, Surrogate, given["surrogate"])
    if "weight" in given:
        built["weight"] = _parse_part("weight", Weight, given["weight"])
    for key, kind in (("centering", bool), ("advantage", str)):
        if key in given:
            built[key] = convert(key, given[key], kind)
    if "mask" in given:
        masks = given["mask"]
        if isinstance(masks, Mapping | str) or not isinstance(masks, Sequence):
            raise TrimtabError("mask is a list of tables: write each as [[objective.mask]]")
        if base.masks and not masks:
            raise TrimtabError(f"mask = [] removes nothing: masks are added to those of {base.name}; leave it out")
        built["masks"] = tuple(_parse_kind("mask", MASKS, Mask, mask) for mask in masks)
    return built


def _parse_kind(what: str, kinds: Mapping[str, type], base: type, given: Any) -> Any:
    if isinstance(given, base):
        return given
    if not isinstance(given, Mapping) or not isinstance(given.get("kind"), str):
        raise TrimtabError(f"{what} is a table with a `kind`, one of {', '.join(kinds)}; not {given!r}")
    kind = given["kind"]
    if kind not in kinds:
        raise TrimtabError(f"unknown {what} {kind!r}{did_you_mean(kind, kinds)}")
    own = given if kinds[kind] is Divergence else {key: value for key, value in given.items() if key != "kind"}
    return _parse_part(f"{what} {kind!r}", kinds[kind], own)


def _parse_part(what: str, part: type, given: Any) -> Any:
    """Builds a part from a table of its fields."""
    if isinstance(given, part):
        return given
    if not isinstance(given, Mapping):
        raise TrimtabError(f"{what} is a table of its fields, not {given!r}")
    known, kinds = {item.name: item for item in fields(part)}, get_type_hints(part)
    for key in given:
        if key not in known:
            raise TrimtabError(f"{what} has no {key!r}{did_you_mean(key, known)}")
    for name, item in known.items():
        if item.default is MISSING and name not in given:
            raise TrimtabError(f"{what} needs {name!r}: give it a value")
    try:
        return part(**{key: convert(key, value, kinds[key]) for key, value in given.items()})
    except ValueError as error:
        raise TrimtabError(f"{what}: {error}") from None


def convert(key: str, value: Any, kind: Any) -> Any:
    """Returns a value of a type, or of one of a union of types; a whole number may stand for a float.

    Raises `TrimtabError` for one of another type. A bool is not a number here.
    """
    for option in get_args(kind) or (kind,):
        if option is float and isinstance(value, Real) and not isinstance(value, bool):
            return float(value)
        if option is int and isinstance(value, Integral) and not isinstance(value, bool):
            return int(value)
        if option not in (float, int) and isinstance(value, option):
            return value
    raise TrimtabError(f"{key} = {value!r} has the wrong type")
