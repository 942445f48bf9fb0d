"""Builds an objective from a name and keywords: a preset or a custom `module:function`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from inspect import Parameter
from numbers import Integral, Real
from typing import Any

from trimtab.errors import TrimtabError, did_you_mean
from trimtab.objectives.aggregation import Aggregation
from trimtab.objectives.composition import COMPOSED, PART_KEYS, compose, error_message
from trimtab.objectives.objective import Objective
from trimtab.objectives.presets import PRESETS, Preset
from trimtab.objectives.regularizers import KL
from trimtab.plugins import load_function

UNSET = " (unset it where a recipe's base sets it)"
"""Ends a message that asks to leave a keyword out."""

LISTING = "`trimtab explain` lists them, `trimtab.objectives()` in Python"


def objectives() -> list[str]:
    """Returns the names of all presets."""
    return list(PRESETS)


def summaries() -> dict[str, str]:
    """What each preset does, in a line: the first of its docstring."""
    return {name: inspect.cleandoc(PRESETS[name].__doc__ or "").partition("\n")[0] for name in objectives()}


def is_custom(name: str) -> bool:
    """Whether a name refers to a custom function. Building it runs that code."""
    return ":" in name


def keywords_of(name: str) -> dict[str, Any]:
    """Returns every keyword of an objective, specific and shared, with its default (`Parameter.empty` where required).

    Not listed are parts (`composition.PART_KEYS`) and `advantage` beside them, which every objective takes.
    Raises `TrimtabError` for an unknown name, and for a function whose keywords have no names.
    """
    constructor = _constructor(name)
    if name == COMPOSED:
        return _shared_keywords(None)
    specific = {key: parameter.default for key, parameter in _parameters(name, constructor).items()}
    shared = _shared_keywords(None if is_custom(name) else constructor())
    return specific | {key: default for key, default in shared.items() if key not in specific}


def _shared_keywords(base: Objective | None) -> dict[str, Any]:
    """Returns the keywords that all objectives have; a regression over responses has no choice of aggregation."""
    kind = KL().kind if base is None else base.kl.kind
    shared = {"denominator": "original", "kl": kind, "kl_coef": 0.0, "entropy_coef": 0.0}
    if base is not None and base.name == "oapl":
        return shared
    aggregation = Aggregation() if base is None else base.aggregation
    return {"aggregation": aggregation.kind, "length_max": aggregation.length_max} | shared


def objective(name: str, **overrides: Any) -> Objective:
    """Builds a named objective with some of its keywords changed.

    name: a preset; `module:function` for a function that returns an `Objective`, whose parameters are the keywords; or
        `composed`, an objective of the given parts alone.

    Parts replace those of the objective, and masks are added to its own: `ratio`, `surrogate`, `weight` and `mask` (a
    list), each a table of the part's fields with `kind` where there are several, or the part itself, and `centering`, a
    bool (docs/objectives.md); `advantage` beside them is the kind of advantage.

    Besides the parameters of its constructor in presets/, every objective takes `aggregation`, `length_max`,
    `denominator`, `kl`, `kl_coef` and `entropy_coef`; `oapl` takes no `aggregation` and no `length_max`. Raises
    `TrimtabError` for an unknown name or keyword, a wrong type, a missing value, and a keyword without effect.
    """
    parts = {key: overrides.pop(key) for key in PART_KEYS if key in overrides}
    known = keywords_of(name)
    advantage = overrides.pop("advantage", None) if parts and "advantage" not in known else None
    for key, value in overrides.items():
        if key == "advantage" and key not in known:
            raise TrimtabError(
                f"objective {name!r} has no keyword 'advantage' where no part is given: set [advantage] kind = "
                f"{value!r} in a recipe"
            )
        if key not in known:
            raise TrimtabError(f"objective {name!r} has no keyword {key!r}{did_you_mean(key, [*known, *PART_KEYS])}")
    for key, default in known.items():
        if default is Parameter.empty and key not in overrides:
            raise TrimtabError(f"objective {name!r} needs the keyword {key!r}: give it a value")
    values = {key: _convert(name, key, value, known[key]) for key, value in overrides.items()}
    try:
        if not parts:
            return _from_keywords(name, values)
        return _with_parts(name, values, parts, advantage)
    except ValueError as error:
        message = str(error).removeprefix(f"{name}: ").removeprefix(f"{name} ")
        raise TrimtabError(f"objective {name!r}: {message}") from error.__cause__


def _from_keywords(name: str, values: Mapping[str, Any]) -> Objective:
    if name == COMPOSED:
        return compose(None, {})
    constructor = _constructor(name)
    specific = _parameters(name, constructor)
    base = _build(name, constructor, {key: value for key, value in values.items() if key in specific})
    return _apply_shared(base, {key: value for key, value in values.items() if key not in specific})


def _with_parts(name: str, values: Mapping[str, Any], parts: Mapping[str, Any], advantage: str | None) -> Objective:
    """Builds an objective with parts given beside its keywords.

    The aggregation is applied with the parts, since a surrogate may not fit the preset's own. Raises `TrimtabError` for
    a keyword that only changes a part which is replaced.
    """
    if name == COMPOSED:
        return compose(None, _completed(None, values, parts), advantage)
    specific = {key: value for key, value in values.items() if key in _parameters(name, _constructor(name))}
    shared = {key: value for key, value in values.items() if key not in specific}
    base = _from_keywords(name, specific)
    built = compose(base, _completed(base, shared, parts), advantage)
    for key in specific:
        try:
            without = _from_keywords(name, {other: value for other, value in specific.items() if other != key})
            changed = compose(without, _completed(without, shared, parts), advantage)
        except (TypeError, ValueError):  # the keyword is required, or another one fits only beside it
            continue
        if _are_equal(changed, built) and not _are_equal(without, base):
            raise TrimtabError(f"{key} has no effect beside the given {', '.join(parts)}: leave it out{UNSET}")
    return built


def _are_equal(left: Objective, right: Objective) -> bool:
    """Whether two objectives are equal. Parts of a user's own that hold tensors, which `==` cannot compare, are not."""
    try:
        return left == right
    except RuntimeError:
        return False


def _constructor(name: str) -> Preset:
    if is_custom(name):
        function = load_function(name, "objective")
        if not callable(function):
            raise TrimtabError(f"objective {name!r} is {type(function).__name__}, not a function of its keywords")
        return function
    if name not in PRESETS and name != COMPOSED:
        raise TrimtabError(f"unknown objective {name!r}{did_you_mean(name, [*PRESETS, COMPOSED], LISTING)}")
    return PRESETS.get(name, Objective)


def _parameters(name: str, constructor: Preset) -> dict[str, Parameter]:
    try:
        parameters = dict(inspect.signature(constructor).parameters)
    except ValueError:
        raise TrimtabError(f"objective {name!r} has no keywords that can be read: wrap it in a function") from None
    for parameter in parameters.values():
        if parameter.kind not in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY):
            raise TrimtabError(
                f"objective {name!r}: {parameter} cannot be given from a recipe, name its keywords one by one"
            )
    return parameters


def _build(name: str, constructor: Preset, keywords: dict[str, Any]) -> Objective:
    try:
        built = constructor(**keywords)
    except ValueError as error:
        if is_custom(name):
            raise
        raise TrimtabError(error_message(constructor, keywords, error)) from None
    except Exception as error:
        if not is_custom(name):
            raise
        raise TrimtabError(f"it ended in {type(error).__name__}: {error}") from error
    if not isinstance(built, Objective):
        raise TrimtabError(f"it returned {type(built).__name__}, not a trimtab.Objective")
    return built


def _apply_shared(base: Objective, given: Mapping[str, Any]) -> Objective:
    """Returns `base` with the given shared keywords changed."""
    return replace(base, **_shared_parts(base, given))


def _completed(base: Objective | None, given: Mapping[str, Any], parts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parts with those that the shared keywords describe."""
    return {**parts, **_shared_parts(base, given)}


def _shared_parts(base: Objective | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of `Objective` that the given shared keywords change."""
    kl = KL() if base is None else base.kl
    if "kl" in given and "kl_coef" not in given and kl.coef == 0:
        raise TrimtabError(f"kl = {given['kl']!r} has no effect without kl_coef")
    changes: dict[str, Any] = {key: given[key] for key in ("entropy_coef",) if key in given}
    # Parts are replaced only when one of their keywords is given: a custom objective may use a subclass.
    if given.keys() & {"aggregation", "denominator", "length_max"}:
        previous = Aggregation() if base is None else base.aggregation
        kind = given.get("aggregation", previous.kind)
        length_max = previous.length_max if kind == previous.kind else None
        denominator = given.get("denominator", previous.denominator)
        changes["aggregation"] = Aggregation(kind, denominator, given.get("length_max", length_max))
    if given.keys() & {"kl", "kl_coef"}:
        changes["kl"] = KL(given.get("kl", kl.kind), given.get("kl_coef", kl.coef))
    return changes


def _convert(name: str, key: str, value: Any, default: Any) -> Any:
    """Returns the value in the type of its default, numbers as float. None is valid where it disables something.

    Raises `TrimtabError` for a value of another type.
    """
    if default is Parameter.empty or (default is None and key not in ("clip_dual", "length_max")):
        return value
    if isinstance(default, bool | str):
        valid = isinstance(value, type(default))
    elif key == "length_max" or isinstance(default, int):
        valid = isinstance(value, Integral) and not isinstance(value, bool)
    elif value is None:
        valid = key == "clip_dual"
    elif default is None or isinstance(default, float):
        valid = isinstance(value, Real) and not isinstance(value, bool)
        value = float(value) if valid else value
    else:
        valid = True
    if not valid:
        raise TrimtabError(f"objective {name!r}: {key} = {value!r} has the wrong type")
    return value
