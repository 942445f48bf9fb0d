"""Builds an objective from a name and keywords, or a section of a recipe.

The name is a preset, a custom `module:function`, or `composed` for an objective built from parts alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from inspect import Parameter
from typing import TYPE_CHECKING, Any

from trimtab.errors import TrimtabError, did_you_mean
from trimtab.objectives.calibrate import check_calibration
from trimtab.objectives.keywords import PART_KEYS, Preset, convert
from trimtab.objectives.objective import Objective
from trimtab.objectives.presets import COMPOSED, PRESETS, get_preset, is_custom
from trimtab.plugins import load_function

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from trimtab.objectives.keywords import Keywords


def objectives() -> list[str]:
    """Returns the names of all presets."""
    return list(PRESETS)


def objective(name: str, **overrides: Unpack[Keywords]) -> Objective:
    """Builds a named objective with some of its keywords changed.

    name: a preset; `module:function` for a function that takes the keywords and returns an `Objective`; or `composed`
        for an objective built from the given parts alone.

    `ratio`, `surrogate`, `weight` and `centering` (a bool) replace parts of the objective; `mask`, a list, is added to
    its masks. Each part is an instance or a table of its fields, with `kind` for surrogates and masks
    (docs/objectives.md). `advantage`, the kind of advantage, may be given only together with parts.

    The other keywords set fields of parts (`keywords.Keywords`). Every objective takes `aggregation`, `length_max`,
    `denominator`, `kl`, `kl_coef` and `entropy_coef`, except that `oapl` takes neither of the first two. Raises
    `TrimtabError` for an unknown name or keyword, a wrong type, a missing value, and a keyword without effect.
    """
    given: dict[str, Any] = dict(overrides)
    _check_names(name, given)
    try:
        preset = _build_custom(name, given) if is_custom(name) else get_preset(name)
        if preset is COMPOSED and "surrogate" not in given:
            raise TrimtabError('it needs a surrogate, such as surrogate = {kind = "clipped"}; or name a preset')
        return preset.with_keywords(given)
    except TrimtabError as error:
        raise TrimtabError(f"objective {name!r}: {error}") from error.__cause__


def from_section(section: Mapping[str, Any], bounds: Mapping[str, Any] | None = None) -> Objective:
    """Returns the objective of an `[objective]` section, which has `name`, `calibrate`, keywords and parts.

    With `calibrate`, `bounds` are the bounds found at step 0; without `bounds`, the published ones apply and the
    equation says so. Raises `TrimtabError` if `objective` or `check_calibration` refuses the section, or if the
    objective was given in code.
    """
    given = {key: value for key, value in section.items() if key not in ("name", "calibrate", "code", "equation")}
    name, calibrate = section["name"], section.get("calibrate", False)
    if section.get("code") is not None:
        raise TrimtabError(
            f"objective {name!r} was given in code (objective.code): pass it again, trimtab.train(..., objective=...)"
        )
    if not isinstance(calibrate, bool):
        raise TrimtabError(f"objective.calibrate = {calibrate!r} has the wrong type: use true or false")
    if not calibrate:
        return objective(name, **given)
    keywords = check_calibration(name, given)
    built = objective(name, **{**given, **(bounds or {})})
    state = "calibrated at step 0" if bounds else "to be calibrated at step 0; the published values stand here"
    return replace(built, notes=(*built.notes, f"{', '.join(keywords)}: {state}"))


def keywords_of(name: str) -> dict[str, Any]:
    """Returns every keyword of an objective with its default (`Parameter.empty` if required).

    Parts (`PART_KEYS`) and `advantage`, which every objective takes, are not listed.
    Raises `TrimtabError` for an unknown name, and for a function whose parameters cannot be given by name.
    """
    if not is_custom(name):
        return get_preset(name).defaults
    own = {key: parameter.default for key, parameter in _parameters(name).items()}
    return {**own, **{key: default for key, default in COMPOSED.defaults.items() if key not in own}}


def split_name(spec: str) -> tuple[str, str]:
    """Splits `NAME` or `NAME:KEY=VALUE,...` into the name, which may be `module:function`, and the rest."""
    name, _, rest = spec.partition(":")
    function, _, more = rest.partition(":")
    own = function and "=" not in function and name not in PRESETS
    return (f"{name}:{function}", more) if own else (name, rest)


def _check_names(name: str, given: Mapping[str, Any]) -> None:
    """Raises `TrimtabError` for a keyword that the objective does not have, and for a missing required one."""
    known, has_parts = keywords_of(name), bool(given.keys() & set(PART_KEYS))
    for key, value in given.items():
        if key in known or key in PART_KEYS or (key == "advantage" and has_parts):
            continue
        if key == "advantage":
            hint = f" where no part is given: set [advantage] kind = {value!r} in a recipe"
        else:
            hint = did_you_mean(key, [*known, *PART_KEYS])
        raise TrimtabError(f"objective {name!r} has no keyword {key!r}{hint}")
    for key, default in known.items():
        if default is Parameter.empty and key not in given:
            raise TrimtabError(f"objective {name!r} needs the keyword {key!r}: give it a value")


def _build_custom(name: str, given: dict[str, Any]) -> Preset:
    """Returns the preset that a custom function builds from its keywords, and removes these from `given`.

    A value must have the type of the parameter's default if the default is a number, a bool or a string.
    """
    keywords = {}
    for key, parameter in _parameters(name).items():
        if key in given:
            default = parameter.default
            kind = type(default) if isinstance(default, bool | int | float | str) else object
            keywords[key] = convert(key, given.pop(key), kind)
    try:
        built = _function(name)(**keywords)
    except TrimtabError:
        raise
    except Exception as error:
        raise TrimtabError(f"it ended in {type(error).__name__}: {error}") from error
    if not isinstance(built, Objective):
        raise TrimtabError(f"it returned {type(built).__name__}, not a trimtab.Objective")
    return Preset(built)


def _function(name: str) -> Callable[..., Any]:
    function = load_function(name, "objective")
    if not callable(function):
        raise TrimtabError(f"objective {name!r} is {type(function).__name__}, not a function of its keywords")
    return function


def _parameters(name: str) -> dict[str, Parameter]:
    function = _function(name)
    try:
        parameters = dict(inspect.signature(function).parameters)
    except ValueError:
        raise TrimtabError(f"objective {name!r} has no keywords that can be read: wrap it in a function") from None
    for parameter in parameters.values():
        if parameter.kind not in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY):
            raise TrimtabError(
                f"objective {name!r}: {parameter} cannot be given from a recipe, name its keywords one by one"
            )
    return parameters
