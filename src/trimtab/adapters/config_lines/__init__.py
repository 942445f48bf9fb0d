"""Renders an objective as configuration of Trimtab or of another trainer.

If the trainer already has this loss, or almost, its own settings are printed; comments that begin with "differs" name
the differences. Otherwise the lines of its adapter are printed, or of the nearest preset if the adapter cannot carry
the objective. Option names are those of verl 0.9.1, TRL 1.16 and Miles 31f1ca96; tests run the lines of verl and TRL.

own_settings    the settings of verl, TRL and Miles
adapter_lines   the lines of the adapters
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trimtab.adapters.config_lines.adapter_lines import adapter_lines, written
from trimtab.adapters.config_lines.own_settings import Absent, miles, trl, verl
from trimtab.adapters.hooks import HOOKS, OWN_RUN, hook
from trimtab.errors import TrimtabError, did_you_mean
from trimtab.objectives import Clipped, Objective, objective
from trimtab.objectives.calibrate import bounds_of

NEAREST = {
    "token-alp": ("token-alp-bypass", "without noise in the model"),
    "seq-alp": ("seq-bypass", "without noise in the model"),
    "soup": ("token-bypass", "the policy that trains begins every response"),
    "m2po": ("token-bypass", "it clips each token's ratio, where m2po bounds the second moment of the whole update"),
    "a3po": ("token-bypass", "its bounds are the same for tokens of every age"),
    "score-centering": ("token-bypass", "it clips ratios and centers nothing"),
}
"""Preset -> (nearest preset, how that one differs), for trainers whose losses and adapter cannot carry the preset."""


def lines(preset: str, overrides: Mapping[str, Any]) -> dict[str, str]:
    """Returns the configuration of each framework: trimtab (TOML), verl (overrides), trl (Python), miles (flags, YAML).

    preset, overrides: as for `trimtab.objective`, custom functions (`module:function`) included. Raises `TrimtabError`
    for unknown presets and keywords.
    """
    return {name: lines_for(name, preset, overrides) for name in ("trimtab", "verl", "trl", "miles")}


def lines_for(trainer: str, preset: str, overrides: Mapping[str, Any]) -> str:
    """Returns the configuration of one trainer (a key of `hooks.HOOKS`, or `trimtab`), with differences as comments.

    Raises `TrimtabError` for unknown trainers, presets and keywords.
    """
    known = ["trimtab", *HOOKS]
    if trainer not in known:
        raise TrimtabError(f"unknown trainer {trainer!r}{did_you_mean(trainer, known)}")
    built = objective(preset, **overrides)
    if trainer == "trimtab":
        return _trimtab(preset, overrides)
    reason = ""
    if trainer in _OWN and preset not in OWN_RUN:
        try:
            own = _OWN[trainer](built)
        except Absent as absent:
            reason = f": {absent}"
        else:
            return "\n".join([*own, *_exactly(trainer, preset, overrides, built, own)])
    return "\n".join(_elsewhere(trainer, preset, overrides, built, reason))


def _exactly(trainer: str, preset: str, overrides: Mapping[str, Any], built: Objective, own: list[str]) -> list[str]:
    """Returns the adapter's lines for exactly this loss, as comments, if a trainer's own settings differ from it."""
    if not any(row.startswith("# differs") for row in own):
        return []
    rows, refusal = adapter_lines(trainer, preset, overrides, built)
    title = "# exactly this loss, with Trimtab's adapter (docs/adapters.md):"
    return [] if refusal else [title, *(row if row.startswith("#") else f"# {row}" for row in rows)]


def _elsewhere(trainer: str, preset: str, overrides: Mapping[str, Any], built: Objective, reason: str) -> list[str]:
    """Returns the lines of the trainer's adapter or, if it refuses, the reason and the lines of the nearest preset."""
    name = hook(trainer).trainer
    for candidate in (trainer, *(["trl-async"] if trainer == "trl" else [])):
        rows, refusal = adapter_lines(candidate, preset, overrides, built)
        if refusal is None:
            own = f"# {name}'s own losses lack {preset}{reason}" if trainer in _OWN else ""
            return [*([own] if own else []), "# with Trimtab's adapter (docs/adapters.md):", *rows]
    refusal = OWN_RUN.get(preset, adapter_lines(trainer, preset, overrides, built)[1])
    cannot = f"# {name} cannot train {preset}, with Trimtab's adapter or without it: {refusal}"
    if preset not in NEAREST:
        return [cannot]
    nearest, differs = NEAREST[preset]
    kept = {"clip_high": built.surrogate.high} if preset == "soup" and isinstance(built.surrogate, Clipped) else {}
    shared = {**kept, **{key: value for key, value in overrides.items() if key in bounds_of(nearest)}}
    return [cannot, f"# differs: nearest is {nearest}; {differs}:", lines_for(trainer, nearest, shared)]


def _trimtab(preset: str, overrides: Mapping[str, Any]) -> str:
    given = {"name": preset, **{key: value for key, value in overrides.items() if value is not None}}
    rows = ["[objective]", *(f"{key} = {written(value, 'toml')}" for key, value in given.items())]
    bounds = bounds_of(preset)
    if bounds and set(bounds) <= set(overrides):
        rows.append(f"# or, in place of {', '.join(bounds)}: calibrate = true")
    return "\n".join(rows)


_OWN: dict[str, Callable[[Objective], list[str]]] = {"verl": verl, "trl": trl, "miles": miles}
