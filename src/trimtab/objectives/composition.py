"""Objectives from parts given as tables, as a recipe does: `ratio`, `surrogate`, `weight`, `mask`, `centering`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from inspect import signature
from numbers import Real
from types import NoneType
from typing import Any, get_args, get_type_hints

from trimtab.corrections.divergences import DIVERGENCES
from trimtab.corrections.masks import OPSM, Band, Divergence, Mask, Veto
from trimtab.corrections.prefix_budget import PrefixBudget
from trimtab.corrections.weights import Weight
from trimtab.errors import TrimtabError, did_you_mean
from trimtab.objectives.advantages import KINDS
from trimtab.objectives.objective import Objective
from trimtab.objectives.policies import Ratio
from trimtab.objectives.ratio_bounds import AgedClip, Banded, GrowingClip
from trimtab.objectives.second_moment import SecondMoment
from trimtab.objectives.smooth_surrogates import GammaWeight, GeometricClip, QuadraticPenalty, SoftGate
from trimtab.objectives.surrogate import Surrogate
from trimtab.objectives.surrogates import Clipped, LogProb, Regression, Reinforce, Shaped, Unclipped

COMPOSED = "composed"
"""The name of an objective that is made of parts alone."""

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


def compose(base: Objective | None, parts: Mapping[str, Any], advantage: str | None = None) -> Objective:
    """Returns `base` with parts replaced and masks added, or without a base an objective of these parts alone.

    parts: by name in `PART_KEYS`, each a table of the part's fields, with `kind` for surrogates and masks, or the part
        itself; `mask` is a list and `centering` a bool. The fields `aggregation`, `kl` and `entropy_coef` of
        `Objective` are taken as they are. Without a base `surrogate` is needed and `ratio` defaults to token
        current/proximal.
    Raises `TrimtabError` for unknown names, wrong types, and combinations that `Objective` refuses.
    """
    built = {name: parts[name] for name in ("aggregation", "kl", "entropy_coef") if name in parts}
    if "ratio" in parts:
        built["ratio"] = _part("ratio", Ratio, parts["ratio"])
    if "surrogate" in parts:
        built["surrogate"] = _of_kind("surrogate", SURROGATES, Surrogate, parts["surrogate"])
    if "weight" in parts:
        built["weight"] = _part("weight", Weight, parts["weight"])
    if "centering" in parts:
        if not isinstance(parts["centering"], bool):
            raise TrimtabError(f"centering is true or false, not {parts['centering']!r}")
        built["centering"] = parts["centering"]
    if "mask" in parts:
        masks = parts["mask"]
        if isinstance(masks, Mapping | str) or not isinstance(masks, Sequence):
            raise TrimtabError("mask is a list of tables: write each as [[objective.mask]]")
        own = () if base is None else base.masks
        if own and not masks:
            assert base is not None
            raise TrimtabError(f"mask = [] removes nothing: masks are added to those of {base.name}; leave it out")
        built["masks"] = own + tuple(_of_kind("mask", MASKS, Mask, mask) for mask in masks)
    over_behavior = "ratio" in built and built["ratio"].over == "behavior"
    if over_behavior and base is not None and base.weight is not None and "weight" not in built:
        raise TrimtabError(
            f"{base.name} has a weight, and a ratio over the behavior policy contains it already: take name = "
            f'"{COMPOSED}" for an objective of parts alone, or a method without a weight'
        )
    if advantage is not None:
        if advantage not in KINDS:
            raise TrimtabError(f"unknown advantage {advantage!r}{did_you_mean(advantage, KINDS)}")
        built["advantage"] = advantage
    if base is not None:
        return replace(base, **built)
    if "surrogate" not in built:
        raise TrimtabError(
            'an objective of parts alone needs a surrogate, such as surrogate = {kind = "clipped"}; or name a preset'
        )
    return Objective(**{"name": COMPOSED, "ratio": Ratio(), **built})


def _of_kind(what: str, kinds: Mapping[str, type], base: type, given: Any) -> Any:
    if isinstance(given, base):
        return given
    if not isinstance(given, Mapping) or not isinstance(given.get("kind"), str):
        raise TrimtabError(f"{what} is a table with a `kind`, one of {', '.join(kinds)}; not {given!r}")
    kind = given["kind"]
    if kind not in kinds:
        raise TrimtabError(f"unknown {what} {kind!r}{did_you_mean(kind, kinds)}")
    part = kinds[kind]
    return _part(
        f"{what} {kind!r}", part, given if part is Divergence else {k: v for k, v in given.items() if k != "kind"}
    )


def _part(what: str, part: type, given: Any) -> Any:
    """Builds a part from a table of its fields."""
    if isinstance(given, part):
        return given
    if not isinstance(given, Mapping):
        raise TrimtabError(f"{what} is a table of its fields, not {given!r}")
    known = {item.name: item for item in fields(part)}
    hints = get_type_hints(part)
    for key, value in given.items():
        if key not in known:
            raise TrimtabError(f"{what} has no {key!r}{did_you_mean(key, known)}")
        _check_type(what, key, value, hints[key])
    for name, item in known.items():
        if item.default is MISSING and name not in given:
            raise TrimtabError(f"{what} needs {name!r}: give it a value")
    try:
        return part(**given)
    except ValueError as error:
        raise TrimtabError(f"{what}: {error_message(part, given, error)}") from None


def error_message(build: Callable[..., Any], given: Mapping[str, Any], error: ValueError) -> str:
    """Returns the message of an error of `build(**given)`, which names the value without which it would not occur.

    A part names itself and its fields, such as `low`; here they are the keywords that set them, such as `clip_low`.
    """
    message = re.sub(r"^[A-Z]\w*: ", "", str(error))
    keywords = [key.rpartition("_") for key in signature(build).parameters]
    wrong = next((group for group in _groups(given) if _builds(build, given, group)), [])
    prefixes = {key.rpartition("_")[0] for key in wrong}
    for prefix, joint, word in keywords:
        is_unique = sum(last == word for _, _, last in keywords) == 1
        if is_unique or prefixes == {prefix}:
            message = re.sub(rf"\b{word}\b", prefix + joint + word, message)
    if not wrong:  # a value that is required cannot be left out, but may be quoted
        wrong = [key for key, value in given.items() if isinstance(value, str) and repr(value) in message]
    if not wrong or any(f"{key} = " in message for key in wrong):
        return message
    return f"{', '.join(f'{key} = {given[key]!r}' for key in wrong)}: {message}"


def _groups(given: Iterable[str]) -> Iterator[list[str]]:
    """Yields each keyword alone, then those that begin alike, such as `keep_min` and `keep_max`, or end alike."""
    parts = {key: key.rpartition("_") for key in given}
    yield from ([key] for key in parts)
    for place in (0, 2):
        for word in dict.fromkeys(part[place] for part in parts.values()):
            yield [key for key, part in parts.items() if part[place] == word]


def _builds(build: Callable[..., Any], given: Mapping[str, Any], without: Sequence[str]) -> bool:
    try:
        build(**{key: value for key, value in given.items() if key not in without})
    except (TypeError, ValueError):  # TypeError: a value is required
        return False
    return True


def _check_type(what: str, key: str, value: Any, annotation: Any) -> None:
    """Raises `TrimtabError` for a value of another type than the annotation: str, bool, Number or Number | None."""
    if annotation in (str, bool):
        valid = isinstance(value, annotation)
    else:
        valid = isinstance(value, Real) and not isinstance(value, bool)
        valid = valid or (value is None and NoneType in get_args(annotation))
    if not valid:
        raise TrimtabError(f"{what}: {key} = {value!r} has the wrong type")
