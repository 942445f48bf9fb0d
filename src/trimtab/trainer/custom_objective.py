"""Objectives given in code or as `module:function`, and how a run records them."""

from __future__ import annotations

import re
from dataclasses import is_dataclass
from typing import Any

from trimtab.errors import TrimtabError
from trimtab.objectives import Objective
from trimtab.objectives.lookup import from_section
from trimtab.objectives.presets import is_custom
from trimtab.trainer.config import Config, parse_config


def resolve(config: Config, given: Objective | None = None) -> tuple[Config, Objective]:
    """Returns the recipe as its config.toml records it, and the objective of the run.

    It records the keywords of a preset, with a `module:function` also its equation, and the equation and `repr` of an
    objective in code. Resuming compares these, and reports print the equation without running the user's code.
    """
    section = config.objective
    if given is not None:
        _check_given(config, given)
        code = re.sub(r" at 0x[0-9a-f]+", "", repr(given))  # addresses of functions differ between processes
        return _with_section(config, {"name": given.name, "code": code, "equation": given.equation()}), given
    built = from_section(section.model_dump())
    if not is_custom(section.name):
        return config, built
    equation = built.equation()
    if section.equation not in (None, equation):
        raise TrimtabError(
            f"objective {section.name!r} no longer builds what objective.equation says, as a run wrote it: restore the "
            "function, or leave objective.equation out of the recipe"
        )
    return _with_section(config, {**section.model_dump(exclude={"code"}), "equation": equation}), built


def refuse_other(saved: Config, config: Config, run: object) -> None:
    """Raises `TrimtabError` if a run would be resumed with another custom objective than it was started with."""
    old, new = saved.objective, config.objective
    if (old.code, old.equation) == (new.code, new.equation):
        return
    if old.code is not None and new.code is None:
        raise TrimtabError(
            f"{run} trains an objective that was given in code ({old.name!r}, objective.code of its config.toml): "
            "resume it with trimtab.train(..., objective=..., resume=True)"
        )
    raise TrimtabError(
        f"{run} was started with another objective than the one given now ({new.name!r}): resume with the one whose "
        "equation its config.toml holds, or choose another --out"
    )


def _with_section(config: Config, section: dict[str, Any]) -> Config:
    data = config.model_dump(exclude_none=True)
    return parse_config({**data, "objective": section}, "objective")


def _check_given(config: Config, given: Objective) -> None:
    if not isinstance(given, Objective):
        raise TrimtabError(f"objective is {type(given).__name__}, not a trimtab.Objective: build one, or name it")
    section = config.objective
    if section.code is None:  # otherwise it is the config.toml of a run with an objective in code
        twice = [*(["calibrate"] if section.calibrate else []), *section.keywords]
        if twice:
            other = given.name if given.name != section.name else "own"
            raise TrimtabError(
                f"the objective is given in code, so {', '.join(f'objective.{key}' for key in twice)} of the recipe "
                f'would have no effect: leave them out, or drop them with the override "objective.name={other}"'
            )
    for part in (given.surrogate, *given.masks, *([] if given.weight is None else [given.weight])):
        if not is_dataclass(part):
            raise TrimtabError(
                f"{type(part).__name__} of objective {given.name!r} must be a frozen dataclass: its values are written "
                "into config.toml, where resuming compares them"
            )
