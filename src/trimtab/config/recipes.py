"""Reads recipes: bases, overrides and validation. Errors are messages of one line."""

from __future__ import annotations

import importlib.resources
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from trimtab.config.paths import located, located_at
from trimtab.config.rule import Facts
from trimtab.config.schema import NAMES, Config
from trimtab.config.section import PluginSection
from trimtab.config.validation import validate
from trimtab.errors import TrimtabError, nearest


def recipe_names() -> list[str]:
    """Names of the recipes in the package."""
    folder = importlib.resources.files("trimtab") / "recipes"
    return sorted(item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml"))


def load_config(recipe: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """Loads a recipe by name, from a TOML file or from a mapping, applies overrides and validates it.

    Overrides are `section.key=value`. Paths become absolute: those in a file are relative to its folder, all others to
    the current one (see paths.py). Raises `TrimtabError` that names the wrong key or value and what to do.
    """
    base, changes = _swapped_base(overrides)
    if isinstance(recipe, Mapping):
        data, where = _based(located(_mutable_copy(recipe), Path()), base, Path(), ()), "config"
    else:
        data, where = _with_base(recipe, base), str(recipe)
        data.setdefault("out", f"runs/{Path(recipe).stem}")
    # Names first: what a part is decides which of its keywords are left to be changed.
    for override in sorted(changes, key=lambda change: parse_override(change)[0] not in NAMES):
        _override(data, override)
    return parse_config(data, where)


def parse_config(data: Mapping[str, Any], where: str) -> Config:
    """Validates parsed data as a recipe; `where` names its origin in error messages."""
    try:
        config = Config.model_validate(data)
        validate(Facts(config), "config")
    except ValidationError as error:
        raise TrimtabError(f"{where}: {_explain(error)}") from None
    except TrimtabError as error:
        raise TrimtabError(f"{where}: {error}") from None
    return config


def _swapped_base(overrides: Sequence[str]) -> tuple[Any, list[str]]:
    """The base that an override names, and the other overrides."""
    base, rest = None, []
    for override in overrides:
        key, value = parse_override(override)
        if key == "base":
            base = value
        else:
            rest.append(override)
    return base, rest


def _with_base(recipe: str | Path, swapped: Any = None, seen: tuple[str, ...] = ()) -> dict[str, Any]:
    """A recipe with everything it is built on; `swapped` takes the place of its own base. `seen`: what led here."""
    shipped = Path(recipe).suffix != ".toml"
    name = str(recipe) if shipped else str(Path(recipe).resolve())
    if name in seen:
        raise TrimtabError(f"base: {' -> '.join((*seen, name))} is a circle: leave one of them out")
    data, folder = _read(recipe), Path(recipe).parent
    # Shipped recipes hold names, no paths.
    return _based(data if shipped else located(data, folder), swapped, folder, (*seen, name))


def _based(data: dict[str, Any], swapped: Any, folder: Path, seen: tuple[str, ...]) -> dict[str, Any]:
    """`data` over its base: a shipped recipe's name, or a file relative to `folder` (that of an override: to here)."""
    own = data.pop("base", None)
    base = own if swapped is None else swapped
    if base is None:
        return data
    if not isinstance(base, str):
        raise TrimtabError(f"base = {base!r}: name a recipe, or a .toml file")
    if base.endswith(".toml") and swapped is None:
        base = str(folder / base)
    # One that was swapped in begins a chain of its own: `laboratory` over `laboratory` is no circle.
    return _merge(_with_base(base, seen=seen if swapped is None else ()), data)


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
            text = path.read_text(encoding="utf-8-sig")
        except OSError as error:
            raise TrimtabError(f"cannot read recipe {path}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise TrimtabError(f"cannot read recipe {path}: it is not UTF-8 text") from None
    try:
        return tomllib.loads(text)
    except ValueError as error:  # TOMLDecodeError, or a number of too many digits
        raise TrimtabError(f"{recipe}: not valid TOML: {error}") from None


def parse_override(override: str) -> tuple[str, Any]:
    """`section.key=value` as its dotted key and a TOML value; what is no TOML is text, so names need no quotes."""
    key, equals, raw = override.partition("=")
    if not equals or not key.strip():
        raise TrimtabError(f"--set {override!r}: write it as section.key=value")
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except ValueError:
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
    part = data.get(parents[0], {}) if key in NAMES else None
    if isinstance(part, Mapping) and part.get("name") != value:
        # Another part starts from its own defaults, not from its predecessor's keywords and sections.
        for section in NAMES[key]:
            data.pop(section, None)
    place = data
    for depth, parent in enumerate(parents, start=1):
        place = place.setdefault(parent, {})
        if not isinstance(place, dict):
            raise TrimtabError(f"--set {override!r}: {_not_a_section('.'.join(parents[:depth]), place)}")
    place[leaf] = located_at(key, value, Path())


def _mutable_copy(mapping: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _mutable_copy(value) if isinstance(value, Mapping) else value for key, value in mapping.items()}


def _explain(error: ValidationError) -> str:
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        *parents, word = first["loc"]
        return f"unknown key {place!r}{nearest(str(word), _known_keys(parents))}"
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if first["type"] == "model_type" or place == "reward":
        return f"{_not_a_section(place, first['input'])}{more}"
    message = first["msg"].removeprefix("Value error, ")
    return (
        f"{place}: {message}, got {first['input']!r}{more}"
        if first["type"] != "value_error"
        else f"{place}: {message}{more}"
    )


def _not_a_section(place: str, value: Any) -> str:
    """What to say of `value` where a section's keys belong."""
    first, *_ = place.split(".")
    if first == "reward":
        name = value.get("name") if isinstance(value, Mapping) else value
        word = name if isinstance(name, str) else "exact"
        return (
            f'reward is a list, because rewards add up: write [[reward]] and below it name = "{word}", or '
            f"--set 'reward=[{{name = \"{word}\"}}]'"
        )
    section = _section(place.split("."))
    if section is None:
        return f"{place!r} is not a section"
    if issubclass(section, PluginSection) and isinstance(value, str):
        return f'{place} is a section: write {place}.name = "{value}"'
    return f"{place} is a section, not {value!r}: set its keys ({', '.join(section.model_fields)})"


def _known_keys(parents: Iterable[int | str]) -> list[str]:
    return list((_section(parents) or Config).model_fields)


def _section(place: Iterable[int | str]) -> type[BaseModel] | None:
    """The model of a section; None where there is none."""
    model: type[BaseModel] = Config
    for word in place:
        field = model.model_fields.get(str(word))
        kinds = [] if field is None else [field.annotation, *get_args(field.annotation)]
        found = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if not found:
            return None
        model = found[0]
    return model
