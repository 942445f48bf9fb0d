"""Builds the objective that a recipe's `[objective]` section describes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trimtab.errors import TrimtabError
from trimtab.objectives.calibrate import check_calibration
from trimtab.objectives.lookup import objective
from trimtab.objectives.objective import Objective


def from_section(section: Mapping[str, Any], bounds: Mapping[str, Any] | None = None) -> Objective:
    """Returns the objective of an `[objective]` section: `name`, `calibrate`, and keywords and parts.

    With `calibrate`, `bounds` are those of step 0; without them the published ones apply, and the equation says so.
    Raises `TrimtabError` for what `objective` and `check_calibration` refuse, and for an objective that was given in
    code.
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
