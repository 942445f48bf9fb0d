"""Loads recipes: reads TOML, applies `base` and overrides, and validates."""

from __future__ import annotations

import importlib.resources
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trimtab.errors import TrimtabError, did_you_mean, neighbors
from trimtab.files import parse_toml, regular_file
from trimtab.runs.layout import CONFIG
from trimtab.text import without_credentials
from trimtab.trainer.config.consistency import contradictions, refuse
from trimtab.trainer.config.overrides import parse_override
from trimtab.trainer.config.recipe_errors import explain_first, not_a_section
from trimtab.trainer.config.recipe_paths import resolve_path, resolve_paths
from trimtab.trainer.config.schema import DEPENDENT_SECTIONS, Config, TaskConfig
from trimtab.trainer.config.training_sections import COMPOSED, OBJECTIVE_PARTS, ObjectiveConfig

_DEFAULT_NAMES = {
    "objective": ObjectiveConfig.model_fields["name"].default,
    "task": TaskConfig.model_fields["name"].default,
}


def recipe_names() -> list[str]:
    """Returns the names of the recipes in the package."""
    folder = importlib.resources.files("trimtab.trainer") / "recipes"
    return sorted(item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml"))


def recipe_file(name: str) -> Path | None:
    """Returns the file of a recipe that is not shipped: a .toml file, or what a run saved as its config.toml."""
    saved = Path(name) / CONFIG
    if name.endswith(".toml"):
        return Path(name)
    return saved if name not in recipe_names() and saved.is_file() else None


def is_recipe(name: str) -> bool:
    """Whether the name is that of a shipped recipe, a .toml file or the directory of a run."""
    return name in recipe_names() or recipe_file(name) is not None


def load_config(recipe: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """Loads a recipe by name, from a TOML file, a run or a mapping, applies overrides and validates it.

    Overrides are `section.key=value`. Paths become absolute: those in a file are relative to its folder, all others to
    the current one (see `resolve_paths`). Raises `TrimtabError` that names the wrong key or value and what to do.
    """
    where = "config" if isinstance(recipe, Mapping) else str(recipe)
    try:
        return parse_config(_read_with_overrides(recipe, overrides), where)
    except RecursionError:
        raise TrimtabError(f"{where}: its values, or the recipes it is based on, are nested too deeply") from None


def _read_with_overrides(recipe: str | Path | Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    base, unset, changes = _split_overrides(overrides)
    if isinstance(recipe, Mapping):
        data = _apply_base(resolve_paths(recipe, Path()), base, Path(), ())
    else:
        data = _read_with_base(recipe, base)
        data.setdefault("out", f"runs/{Path(recipe).stem}")
    _unset(data, unset, "the recipe")
    # Names first: a part of another name starts without the keywords of its predecessor.
    for override in sorted(changes, key=lambda change: parse_override(change)[0] not in DEPENDENT_SECTIONS):
        _override(data, override)
    return data


def parse_config(data: Mapping[str, Any], where: str) -> Config:
    """Validates parsed data as a recipe; `where` names its origin in error messages."""
    try:
        config = Config.model_validate(data)
        refuse(contradictions(config))
    except ValidationError as error:
        raise TrimtabError(without_credentials(f"{where}: {explain_first(error)}")) from None
    except TrimtabError as error:
        raise TrimtabError(without_credentials(f"{where}: {error}")) from None
    return config


def _split_overrides(overrides: Sequence[str]) -> tuple[Any, list[Any], list[str]]:
    """Returns the values of the overrides `base` (None without one) and `unset`, and the other overrides."""
    base, unset, rest = None, [], []
    for override in overrides:
        key, value = parse_override(override)
        if key == "base":
            base = value
        elif key == "unset":
            unset += value if isinstance(value, list) else [value]
        else:
            rest.append(override)
    return base, unset, rest


def _read_with_base(recipe: str | Path, override: Any = None, chain: tuple[str, ...] = ()) -> dict[str, Any]:
    """Returns the keys of a recipe and of all its bases.

    Args:
        override: a base that replaces the recipe's own.
        chain: names of the recipes that are built on this one.
    """
    file = recipe_file(str(recipe))
    name = str(recipe) if file is None else os.path.realpath(file)
    if name in chain:
        raise TrimtabError(f"base: {' -> '.join((*chain, name))} is a circle: leave one of them out")
    # Shipped recipes contain no paths.
    folder = Path() if file is None else file.parent
    data = _read(str(recipe)) if file is None else resolve_paths(_read(file), folder)
    return _apply_base(data, override, folder, (*chain, name))


def _apply_base(data: dict[str, Any], override: Any, folder: Path, chain: tuple[str, ...]) -> dict[str, Any]:
    """Returns `data` merged over its base, without the keys and sections of the base that `unset` lists.

    A base is a shipped recipe's name or a file. The file's path is relative to `folder`, in an override to the current
    folder.
    """
    if "unset" in data and "base" not in data:
        raise TrimtabError(f"unset = {data['unset']!r} has no effect without a base: leave it out")
    base, unset = data.pop("base", None), data.pop("unset", [])
    base = base if override is None else override
    if base is None:
        return data
    if not isinstance(base, str):
        raise TrimtabError(f"base = {base!r}: name a recipe, or a .toml file")
    if base.endswith(".toml") and override is None:
        base = str(folder / base)
    # The base of an override starts a new chain: `laboratory` over `laboratory` is not a circle.
    inherited = _read_with_base(base, chain=chain if override is None else ())
    # What a recipe takes back from its own base, another base may not have.
    _unset(inherited, unset, None if override is not None else f"base {base!r}")
    return _merge(inherited, data)


def _unset(data: dict[str, Any], keys: Any, where: str | None) -> None:
    """Removes keys and sections, each written with dots, from `data`.

    Raises `TrimtabError` for one that is not set, unless `where`, the origin of the data, is None.
    """
    if not isinstance(keys, list | tuple) or not all(isinstance(key, str) for key in keys):
        raise TrimtabError(f'unset = {keys!r}: write a list of keys, such as unset = ["objective.clip_high", "prefix"]')
    for key in keys:
        *parents, leaf = key.split(".")
        section: Any = data
        for parent in parents:
            section = section.get(parent) if isinstance(section, dict) else None
        if isinstance(section, dict) and leaf in section:
            del section[leaf]
        elif where is not None:
            raise TrimtabError(f"unset: {where} sets no {key!r}{did_you_mean(key, _keys_of(data))}")


def _keys_of(data: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Returns all keys and sections, written with dots."""
    keys = [prefix + key for key in data]
    return keys + [
        word for key, value in data.items() if isinstance(value, Mapping) for word in _keys_of(value, f"{prefix}{key}.")
    ]


def _merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        merged[key] = _merge(merged[key], value) if _extends(key, merged.get(key), value) else value
    return merged


def _extends(key: str, old: Any, new: Any) -> bool:
    """Whether both are sections `key` and the new one has no other name; another one starts from its own defaults."""
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        return False
    name, which = _name_of(key, old), "kind" if key in OBJECTIVE_PARTS else "name"
    # A name that neither writes down follows from both.
    implied = name if which in old else _name_of(key, {**old, **new})
    return new.get(which, implied) == name


def _name_of(key: str, section: Mapping[str, Any]) -> Any:
    """Returns the name of a section, or the kind of a part; where it is not written, the one it has by default."""
    if key in OBJECTIVE_PARTS:
        return section.get("kind")
    if "name" in section:
        return section["name"]
    if key == "objective" and "surrogate" in section:
        return COMPOSED
    return _DEFAULT_NAMES.get(key)


def _read(recipe: str | Path) -> dict[str, Any]:
    """Returns the keys of a shipped recipe (a name) or of a file (a path)."""
    if isinstance(recipe, str):
        if recipe not in recipe_names():
            listing = "`trimtab recipes` lists them; a file ends in .toml, and a run's folder holds its config.toml"
            hint = ("/" in recipe and neighbors(Path(recipe))) or did_you_mean(recipe, recipe_names(), listing)
            raise TrimtabError(f"unknown recipe {recipe!r}{hint}")
        text = (importlib.resources.files("trimtab.trainer") / "recipes" / f"{recipe}.toml").read_text(encoding="utf-8")
    else:
        try:
            text = regular_file(recipe).read_text(encoding="utf-8-sig")
        except OSError as error:
            raise TrimtabError(f"cannot read recipe {recipe}: {error.strerror}{neighbors(recipe)}") from None
        except UnicodeDecodeError:
            raise TrimtabError(f"cannot read recipe {recipe}: it is not UTF-8 text") from None
    try:
        return parse_toml(text)
    except ValueError as error:  # TOMLDecodeError, or a number of too many digits
        raise TrimtabError(f"{recipe}: not valid TOML: {error}") from None


def _override(data: dict[str, Any], override: str) -> None:
    key, value = parse_override(override)
    *parents, leaf = key.split(".")
    part = data.get(parents[0], {}) if key in DEPENDENT_SECTIONS else None
    if isinstance(part, Mapping) and _name_of(parents[0], part) != value:
        # Another part starts from its own defaults, without its predecessor's keywords and sections.
        for name in DEPENDENT_SECTIONS[key]:
            data.pop(name, None)
    section = data
    for depth, parent in enumerate(parents, start=1):
        section = section.setdefault(parent, {})
        if not isinstance(section, dict):
            raise TrimtabError(f"--set {override!r}: {not_a_section('.'.join(parents[:depth]), section)}")
    section[leaf] = resolve_path(key, value, Path())
