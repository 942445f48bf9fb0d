"""The objective of a run, from its config.toml. A report never executes code that the config names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trimtab.objectives import Objective
from trimtab.objectives.calibrate import bounds_of
from trimtab.objectives.lookup import from_section
from trimtab.objectives.presets import is_custom


def known_objective(config: Mapping[str, Any]) -> Objective | None:
    """Returns the objective of a run, or None if this version does not know it or if it is user code."""
    section = config.get("objective", {})
    try:
        return None if "code" in section or is_custom(section["name"]) else from_section(section)
    except (KeyError, TypeError, ValueError):
        return None


def equation_of(config: Mapping[str, Any], metrics: Mapping[str, Any]) -> str:
    """Returns the resolved equation of a run's objective, or the reason why it cannot be built.

    For an objective that is not a preset it is in config.toml. `metrics` of any step have the calibrated bounds.
    """
    section = config.get("objective", {})
    try:
        if not isinstance(section, Mapping):
            raise ValueError(f"its config.toml has objective = {section!r}, which is not a section")
        if "equation" in section:
            return str(section["equation"])
        if is_custom(section["name"]):
            raise ValueError(f"its config.toml has no equation of {section['name']!r}")
        keys = {name: f"calibrate/{name}" for name in bounds_of(section["name"])}
        bounds = {name: float(metrics[key]) for name, key in keys.items() if key in metrics}
        return from_section(section, bounds).equation(config.get("advantage", {}).get("kind"))
    except (KeyError, TypeError, ValueError) as error:
        return f"not known to this version of trimtab: {error}"
