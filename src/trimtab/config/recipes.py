"""Recipes: TOML in, one fully checked `Config` out; one line for every mistake."""

from __future__ import annotations

import importlib.resources
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from trimtab.config.schema import NAMES, Config
from trimtab.errors import TrimtabError, nearest


def recipe_names() -> list[str]:
    """Recipes shipped inside the package."""
    folder = importlib.resources.files("trimtab") / "recipes"
    return sorted(item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml"))


def load_config(recipe: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """Resolve a recipe name, a TOML file or a mapping, apply `section.key=value` overrides, and check everything.

    Raises `TrimtabError` with one line that names the offending word and what to do.
    """
    if isinstance(recipe, Mapping):
        data, where = _thaw(recipe), "config"
    else:
        data, where = _read(recipe), str(recipe)
        data.setdefault("out", f"runs/{Path(recipe).stem}")
    base, changes = _base(data, overrides)
    if base is not None:
        data = _merge(_read(base), data)
    # Names first: what a part is decides which of its keywords are left to be changed.
    for override in sorted(changes, key=lambda change: parse_override(change)[0] not in NAMES):
        _override(data, override)
    return check_config(data, where)


def check_config(data: Mapping[str, Any], where: str) -> Config:
    """Validate already parsed data; `where` names its origin in error messages."""
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise TrimtabError(f"{where}: {_explain(error)}") from None


def _base(data: dict[str, Any], overrides: Sequence[str]) -> tuple[str | None, list[str]]:
    """The recipe that `data` changes (its own `base`, or the one an override names), and the other overrides."""
    base = data.pop("base", None)
    rest = []
    for override in overrides:
        key, value = parse_override(override)
        if key == "base":
            base = value
        else:
            rest.append(override)
    if base is not None and (not isinstance(base, str) or "base" in _read(base)):
        raise TrimtabError(f"base = {base!r}: name a recipe that has no base itself")
    return base, rest


def _merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        merged[key] = _merge(merged[key], value) if _extends(merged.get(key), value) else value
    return merged


def _extends(old: Any, new: Any) -> bool:
    """Whether both are sections; a named part of another name starts from its own defaults instead."""
    both = isinstance(old, Mapping) and isinstance(new, Mapping)
    return both and new.get("name", old.get("name")) == old.get("name")


def _read(recipe: str | Path) -> dict[str, Any]:
    path = Path(recipe)
    if path.suffix != ".toml":
        name = str(recipe)
        if name not in recipe_names():
            raise TrimtabError(f"unknown recipe {name!r}{nearest(name, recipe_names())}")
        text = (importlib.resources.files("trimtab") / "recipes" / f"{name}.toml").read_text()
    else:
        try:
            text = path.read_text()
        except OSError as error:
            raise TrimtabError(f"cannot read recipe {path}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise TrimtabError(f"cannot read recipe {path}: it is not UTF-8 text") from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise TrimtabError(f"{recipe}: not valid TOML: {error}") from None


def parse_override(override: str) -> tuple[str, Any]:
    """`section.key=value` as its dotted key and a TOML value; what is no TOML is text, so names need no quotes."""
    key, equals, raw = override.partition("=")
    if not equals or not key.strip():
        raise TrimtabError(f"--set {override!r}: write it as section.key=value")
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw
    if value == raw and raw[:1] in ("'", '"'):
        raise TrimtabError(
            f"{override}: the value is not a TOML string; between single quotes everything stands for itself, between "
            'double quotes a backslash is written \\\\ and a quote \\"'
        )
    return key.strip(), value


def _override(data: dict[str, Any], override: str) -> None:
    key, value = parse_override(override)
    *parents, leaf = key.split(".")
    if key in NAMES and data.get(parents[0], {}).get("name") != value:
        # Another part starts from its own defaults, not from its predecessor's keywords and sections.
        for section in NAMES[key]:
            data.pop(section, None)
    for parent in parents:
        child = data.setdefault(parent, {})
        if not isinstance(child, dict):
            raise TrimtabError(f"--set {override!r}: {parent!r} is not a section")
        data = child
    data[leaf] = value


def _thaw(mapping: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _thaw(value) if isinstance(value, Mapping) else value for key, value in mapping.items()}


def _explain(error: ValidationError) -> str:
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        *parents, word = first["loc"]
        return f"unknown key {place!r}{nearest(str(word), _known_keys(parents))}"
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    message = first["msg"].removeprefix("Value error, ")
    return (
        f"{place}: {message}, got {first['input']!r}{more}"
        if first["type"] != "value_error"
        else f"{place}: {message}{more}"
    )


def _known_keys(parents: Iterable[int | str]) -> list[str]:
    model: type[BaseModel] = Config
    for parent in parents:
        annotation = model.model_fields[str(parent)].annotation if str(parent) in model.model_fields else None
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            model = annotation
    return list(model.model_fields)
