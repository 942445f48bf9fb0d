"""Reads a run's recipe for its numerics: dtypes of trainer and sampler, and quantization."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trimtab.diagnosis.records import Settings
from trimtab.files import parse_toml

_TRAJECTORIES = "trajectories"
"""The folder of a run directory that holds its files; config.toml lies beside it."""


def settings_of(files: Iterable[Path]) -> tuple[Settings | None, tuple[str, ...]]:
    """Returns the settings of the runs that the files belong to, and a sentence for each reason not to use them.

    None without a run's config.toml beside the files (or beside their `trajectories` folder), or when runs differ.
    """
    recipes = dict.fromkeys(recipe for file in files if (recipe := _recipe_of(file)) is not None)
    known: list[Settings] = []
    for recipe in recipes:
        try:
            settings = _settings(parse_toml(recipe.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            return None, (f"{recipe} cannot be read ({' '.join(str(error).split())}): its settings are no evidence",)
        if settings is not None:
            known.append(settings)
    if not known or len(known) < len(recipes):
        return None, ()
    if any(settings != known[0] for settings in known):
        return None, ("the runs' recipes differ in their numerics: none of them is taken as evidence",)
    return known[0], ()


def run_of(file: Path) -> Path | None:
    """Returns the run directory that a file belongs to, or None."""
    recipe = _recipe_of(file)
    return None if recipe is None else recipe.parent


def model_of(run: Path) -> str | None:
    """Returns the model of a run's recipe; None if it cannot be read."""
    try:
        model = parse_toml((run / "config.toml").read_text(encoding="utf-8")).get("model")
    except (OSError, ValueError):
        return None
    path = model.get("path") if isinstance(model, Mapping) else None
    return path if isinstance(path, str) else None


def _recipe_of(file: Path) -> Path | None:
    folder = Path(os.path.realpath(file)).parent
    candidates = [folder / "config.toml"]
    if folder.name == _TRAJECTORIES:
        candidates.append(folder.parent / "config.toml")
    return next((path for path in candidates if path.is_file()), None)


def _settings(recipe: Mapping[str, Any]) -> Settings | None:
    """Returns the settings of a resolved recipe, or None for another file."""
    engine, model = recipe.get("engine"), recipe.get("model")
    if not isinstance(engine, Mapping) or not isinstance(model, Mapping):
        return None
    sampler, trainer, autocast = engine.get("dtype"), model.get("dtype"), model.get("autocast")
    if not all(isinstance(value, str) for value in (sampler, trainer, autocast)):
        return None
    return Settings(str(sampler), str(trainer), str(autocast), _coarse(engine))


def _coarse(engine: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Returns the keys that quantize the sampler's weights or cache; None for a server, which has its own settings."""
    if engine.get("type") == "server":
        return None
    vllm = engine.get("vllm", {}) if engine.get("type") == "vllm" else {}
    settings: Sequence[tuple[str, Any, Sequence[Any]]] = (
        ("engine.quantize", engine.get("quantize"), (None, "none")),
        ("engine.noise", engine.get("noise"), (None, 0.0)),
        ("engine.vllm.quantization", vllm.get("quantization"), (None,)),
        ("engine.vllm.kv_cache_dtype", vllm.get("kv_cache_dtype"), (None, "auto", "bfloat16", "float16", "float32")),
    )
    return tuple(f"{key} = {value}" for key, value, plain in settings if value not in plain)
