"""Builds an objective from a name and keywords: a preset, or a user's `module:function`."""

from __future__ import annotations

import inspect
from dataclasses import replace
from inspect import Parameter
from numbers import Integral, Real
from typing import Any

from trimtab.errors import TrimtabError, nearest
from trimtab.objectives.aggregation import Aggregation
from trimtab.objectives.objective import Objective
from trimtab.objectives.presets import PRESETS, Preset
from trimtab.objectives.regularizers import KL
from trimtab.plugins import load_function


def objectives() -> list[str]:
    """Names of all presets."""
    return list(PRESETS)


def is_own(name: str) -> bool:
    """Whether a name is that of a function of one's own. To build it is to run that code."""
    return ":" in name


def keywords_of(name: str) -> dict[str, Any]:
    """Every keyword an objective takes, its own and the shared ones, with its default (`Parameter.empty`: it has none).

    Raises `TrimtabError` for an unknown name, and for a function whose keywords have no names.
    """
    constructor = _constructor(name)
    own = {key: part.default for key, part in _parameters(name, constructor).items()}
    base = None if is_own(name) else constructor()
    kind = KL().kind if base is None else base.kl.kind
    shared = {"denominator": "original", "kl": kind, "kl_coef": 0.0, "entropy_coef": 0.0}
    if name != "oapl":
        aggregation = Aggregation() if base is None else base.aggregation
        shared = {"aggregation": aggregation.kind, "length_max": aggregation.length_max} | shared
    return own | {key: default for key, default in shared.items() if key not in own}


def objective(name: str, **overrides: Any) -> Objective:
    """A named method with some of its keywords changed.

    name: a preset, or `module:function` for a function that returns an `Objective`; its parameters are its keywords.

    Every method has its own keywords (its constructor in presets.py) and shares `aggregation`, `length_max`,
    `denominator`, `kl`, `kl_coef`, `entropy_coef`; `oapl` has its own aggregation. Raises `TrimtabError` for an unknown
    name, an unknown keyword, one of a wrong type, and one that would have no effect.
    """
    known = keywords_of(name)
    for key in overrides:
        if key not in known:
            raise TrimtabError(f"objective {name!r} has no keyword {key!r}{nearest(key, known)}")
    for key, default in known.items():
        if default is Parameter.empty and key not in overrides:
            raise TrimtabError(f"objective {name!r} needs the keyword {key!r}: give it a value")
    given = {key: _checked(name, key, value, known[key]) for key, value in overrides.items()}
    constructor = _constructor(name)
    own = _parameters(name, constructor)
    try:
        base = _built(name, constructor, {key: value for key, value in given.items() if key in own})
        return _with_shared(base, {key: value for key, value in given.items() if key not in own})
    except ValueError as error:
        raise TrimtabError(f"objective {name!r}: {error}") from error.__cause__


def _constructor(name: str) -> Preset:
    if is_own(name):
        function = load_function(name, "objective")
        if not callable(function):
            raise TrimtabError(f"objective {name!r} is {type(function).__name__}, not a function of its keywords")
        return function
    if name not in PRESETS:
        raise TrimtabError(f"unknown objective {name!r}{nearest(name, PRESETS)}")
    return PRESETS[name]


def _parameters(name: str, constructor: Preset) -> dict[str, Parameter]:
    try:
        found = dict(inspect.signature(constructor).parameters)
    except ValueError:
        raise TrimtabError(f"objective {name!r} has no keywords that can be read: wrap it in a function") from None
    for part in found.values():
        if part.kind not in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY):
            raise TrimtabError(
                f"objective {name!r}: {part} cannot be given from a recipe, name its keywords one by one"
            )
    return found


def _built(name: str, constructor: Preset, given: dict[str, Any]) -> Objective:
    try:
        built = constructor(**given)
    except ValueError:
        raise
    except Exception as error:
        if not is_own(name):
            raise
        raise TrimtabError(f"it ended in {type(error).__name__}: {error}") from error
    if not isinstance(built, Objective):
        raise TrimtabError(f"it returned {type(built).__name__}, not a trimtab.Objective")
    return built


def _with_shared(base: Objective, given: dict[str, Any]) -> Objective:
    """`base` with the shared keywords that were given, and its own value of the others."""
    if "kl" in given and "kl_coef" not in given and base.kl.coef == 0:
        raise TrimtabError(f"kl = {given['kl']!r} has no effect without kl_coef")
    changes: dict[str, Any] = {key: given[key] for key in ("entropy_coef",) if key in given}
    # A part of one's own class stays unless one of its keywords is given.
    if given.keys() & {"aggregation", "denominator", "length_max"}:
        old = base.aggregation
        kind = given.get("aggregation", old.kind)
        budget = old.length_max if kind == old.kind else None
        denominator = given.get("denominator", old.denominator)
        changes["aggregation"] = Aggregation(kind, denominator, given.get("length_max", budget))
    if given.keys() & {"kl", "kl_coef"}:
        changes["kl"] = KL(given.get("kl", base.kl.kind), given.get("kl_coef", base.kl.coef))
    return replace(base, **changes)


def _checked(name: str, key: str, value: Any, default: Any) -> Any:
    """The value in the type of its default, numbers as float; None only where it switches something off."""
    if default is Parameter.empty or (default is None and key not in ("clip_dual", "length_max")):
        return value
    if isinstance(default, bool | str):
        right = isinstance(value, type(default))
    elif key == "length_max" or isinstance(default, int):
        right = isinstance(value, Integral) and not isinstance(value, bool)
    elif value is None:
        right = key == "clip_dual"
    elif default is None or isinstance(default, float):
        right = isinstance(value, Real) and not isinstance(value, bool)
        value = float(value) if right else value
    else:
        right = True
    if not right:
        raise TrimtabError(f"objective {name!r}: {key} = {value!r} has the wrong type")
    return value
