"""Loads recipes: reads TOML, makes paths absolute, applies `base` and overrides, and validates.

Paths in a file are relative to the folder of the file; other paths are relative to the current folder. An override is a
string `section.key=value`; `split_overrides` splits a string with several of them.
"""

from __future__ import annotations

import importlib.resources
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from trimtab.errors import TrimtabError, did_you_mean, explain, first_problem, neighbors
from trimtab.files import parse_toml, regular_file
from trimtab.runs.layout import CONFIG
from trimtab.text import without_credentials
from trimtab.trainer.config.base import PluginSection
from trimtab.trainer.config.consistency import contradictions, refuse
from trimtab.trainer.config.rollout_sections import TaskConfig
from trimtab.trainer.config.schema import DEPENDENT_SECTIONS, Config
from trimtab.trainer.config.training_sections import COMPOSED, OBJECTIVE_PARTS, ObjectiveConfig

_DEFAULT_NAMES = {
    "objective": ObjectiveConfig.model_fields["name"].default,
    "task": TaskConfig.model_fields["name"].default,
}
# Keys that hold a path, each with the values that are names instead. `out` is not listed because it is relative to the
# current folder, like `--out`.
PATH_KEYS = {"task.path": (), "task.test_path": (), "demonstrations.path": ("gold",), "engine.server.folder": ()}
LABORATORY_MODELS = ("laboratory", "laboratory-moe", "laboratory-switch", "laboratory-tools", "laboratory-long")
# Keys that hold a folder or a name (on the hub, or of a shipped model: these names are listed).
NAMES_OR_FOLDERS = {
    **dict.fromkeys(("model.path", "model.reference"), ("smollm2-135m-instruct", *LABORATORY_MODELS)),
    "task.dataset": (),
}
TASK_LISTS = ("eval.task", "task.part")  # lists of tasks; their paths have the same keys as in `[task]`
SHIPPED = importlib.resources.files("trimtab.trainer") / "recipes"
SHORT_NUMBER = re.compile(r"[+-]?(\.\d+|\d+\.)([eE][+-]?\d+)?")  # a number in Python but not in TOML: .1 or 1.


def recipe_names() -> list[str]:
    """Returns the names of the shipped recipes."""
    return sorted(item.name.removesuffix(".toml") for item in SHIPPED.iterdir() if item.name.endswith(".toml"))


def recipe_file(name: str) -> Path | None:
    """Returns the file of a recipe that is not shipped: a .toml file, or the config.toml of a run directory."""
    saved = Path(name) / CONFIG
    if name.endswith(".toml"):
        return Path(name)
    return saved if name not in recipe_names() and saved.is_file() else None


def is_recipe(name: str) -> bool:
    """Whether `name` is a shipped recipe, a .toml file, or a run directory."""
    return name in recipe_names() or recipe_file(name) is not None


def load_config(recipe: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """Loads a recipe (a name, a TOML file, a run directory or a mapping), applies overrides, and validates it.

    Overrides are `section.key=value`. Paths become absolute: paths in a file are relative to the folder of the file,
    other paths to the current folder (see `resolve_paths`). Raises `TrimtabError`, which names the wrong key or value
    and what to do.
    """
    where = "config" if isinstance(recipe, Mapping) else str(recipe)
    try:
        return parse_config(_read_with_overrides(recipe, overrides), where)
    except RecursionError:
        raise TrimtabError(f"{where}: its values, or the recipes it is based on, are nested too deeply") from None


def _read_with_overrides(recipe: str | Path | Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    base, unset, changes = None, [], []
    for override in overrides:
        key, value = parse_override(override)
        if key == "base":
            base = value
        elif key == "unset":
            unset += value if isinstance(value, list) else [value]
        else:
            changes.append((override, key, value))
    if isinstance(recipe, Mapping):
        data = _apply_base(resolve_paths(recipe, Path()), base, Path(), ())
    else:
        data = _read_with_base(recipe, base)
        data.setdefault("out", f"runs/{Path(recipe).stem}")
    _unset(data, unset, "the recipe")
    # Names first: a section with a new name starts without the keywords of the old one.
    for override, key, value in sorted(changes, key=lambda change: change[1] not in DEPENDENT_SECTIONS):
        _override(data, override, key, value)
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


def _read_with_base(recipe: str | Path, override: Any = None, chain: tuple[str, ...] = ()) -> dict[str, Any]:
    """Returns the keys of a recipe merged over the keys of its bases.

    Args:
        override: a base that replaces the base named in the recipe.
        chain: names of the recipes that have this recipe as their base, directly or indirectly.
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
    """Returns `data` merged over its base; keys and sections listed in `unset` are removed from the base.

    A base is the name of a shipped recipe or the path of a file. The path is relative to `folder`; in an override, it
    is relative to the current folder.
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
    # A base given as an override starts a new chain: `laboratory` over `laboratory` is not a circle.
    inherited = _read_with_base(base, chain=chain if override is None else ())
    # The base of an override may lack the keys that the recipe unsets.
    _unset(inherited, unset, None if override is not None else f"base {base!r}")
    return _merge(inherited, data)


def _unset(data: dict[str, Any], keys: Any, where: str | None) -> None:
    """Removes dotted keys and sections from `data`.

    `where` names the origin of the data. Raises `TrimtabError` if a key is not set, unless `where` is None.
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
    """Returns all keys and sections as dotted names."""
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
    """Whether section `new` extends section `old`: both have the same name. Otherwise `new` starts from defaults."""
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        return False
    name, which = _name_of(key, old), "kind" if key in OBJECTIVE_PARTS else "name"
    # If neither names it, the default is derived from the merged section.
    implied = name if which in old else _name_of(key, {**old, **new})
    return new.get(which, implied) == name


def _name_of(key: str, section: Mapping[str, Any]) -> Any:
    """Returns the name of a section, or the kind of a part of an objective; its default if it is not written."""
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
        text = (SHIPPED / f"{recipe}.toml").read_text(encoding="utf-8")
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


def _override(data: dict[str, Any], override: str, key: str, value: Any) -> None:
    *parents, leaf = key.split(".")
    part = data.get(parents[0], {}) if key in DEPENDENT_SECTIONS else None
    if isinstance(part, Mapping) and _name_of(parents[0], part) != value:
        # A part with another name starts from its defaults, without the keywords and sections of the old part.
        for name in DEPENDENT_SECTIONS[key]:
            data.pop(name, None)
    section = data
    for depth, parent in enumerate(parents, start=1):
        section = section.setdefault(parent, {})
        if not isinstance(section, dict):
            raise TrimtabError(f"--set {override!r}: {not_a_section('.'.join(parents[:depth]), section)}")
    section[leaf] = resolve_paths({leaf: value}, Path(), key.removesuffix(leaf))[leaf]


def resolve_paths(data: Mapping[str, Any], folder: Path, prefix: str = "") -> dict[str, Any]:
    """Returns the `data` of a recipe (or of its section `prefix`) with paths resolved against `folder`.

    A model or data set is a folder if it begins with `/`, `.` or `~`, has more than one `/`, or exists as a folder. Any
    other value, such as `Qwen/Qwen2.5-0.5B`, is a name and stays unchanged. A data set without `/` is always a name,
    because the data sets of some tasks are not files.
    """
    resolved = dict(data)
    for name, value in data.items():
        key = prefix + name
        if isinstance(value, Mapping):
            resolved[name] = resolve_paths(value, folder, f"{key}.")
        elif isinstance(value, str) and _is_path(key, value, folder):
            resolved[name] = str(_absolute(value, folder))
        elif isinstance(value, list) and key in TASK_LISTS:
            resolved[name] = [resolve_paths({"task": task}, folder)["task"] for task in value]
    return resolved


def _is_path(key: str, value: str, folder: Path) -> bool:
    if key in PATH_KEYS:
        return value not in PATH_KEYS[key]
    if key not in NAMES_OR_FOLDERS or value in NAMES_OR_FOLDERS[key]:
        return False
    is_one_word = key == "task.dataset" and "/" not in value
    is_written_as_path = value.startswith(("/", ".", "~")) or value.count("/") > 1
    return is_written_as_path or (not is_one_word and _absolute(value, folder).is_dir())


def _absolute(value: str, folder: Path) -> Path:
    try:
        expanded = Path(value).expanduser()
    except RuntimeError:
        raise TrimtabError(f"path {value!r}: there is no such user; write the folder out") from None
    # Links in `folder` are resolved so that a resumed run gets the same path; symbolic links in `value` are kept.
    return Path(os.path.normpath(folder.resolve() / expanded))


def parse_override(override: str) -> tuple[str, Any]:
    """Returns the dotted key and the value of `section.key=value`.

    A value that is not valid TOML is text, so that names need no quotes. Numbers such as `.1` are numbers nevertheless.
    """
    key, equals, raw = map(str.strip, override.partition("="))
    if not equals or not key:
        raise TrimtabError(f"--set {override!r}: write it as section.key=value")
    try:
        value = parse_toml(f"value = {raw}")["value"]
    except ValueError:
        value = float(raw) if SHORT_NUMBER.fullmatch(raw) else raw
    if value == raw and raw[:1] in ("'", '"'):
        raise TrimtabError(
            f"{override}: the value is not a TOML string; between single quotes everything stands for itself, between "
            'double quotes a backslash is written \\\\ and a quote \\"'
        )
    return key, value


def split_overrides(text: str, where: str) -> list[str]:
    """Splits `a=1,b=[2,3]` into `a=1` and `b=[2,3]`: commas inside brackets or quotes belong to the value.

    Raises `TrimtabError` for an unmatched bracket or quote or a part without `=`; the message begins with `where`.
    """
    parts, depth, quote, escaped = [""], 0, "", False
    for character in text:
        if escaped:
            escaped = False
        elif quote:
            escaped = (quote, character) == ('"', "\\")
            quote = "" if character == quote else quote
        elif character in "\"'" and (depth or parts[-1].rstrip().endswith("=")):
            quote = character
        else:
            depth += (character in "[{") - (character in "]}")
        if character == "," and not quote and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    if quote or depth:
        what = f"the quote {quote}" if quote else "a bracket"
        raise TrimtabError(
            f"{where}: {what} in {parts[-1]!r} has no partner; put a value with brackets in single quotes"
        )
    options = [part for part in parts if part.strip()]
    bad = next((part for part in options if "=" not in part), None)
    if bad is not None:
        raise TrimtabError(f"{where}: {bad!r} is not KEY=VALUE; put a value that holds a comma in quotes")
    return options


def explain_first(error: ValidationError) -> str:
    """Returns one line with the first problem that pydantic reports, and the number of other problems."""
    first = first_problem(error)
    key = ".".join(str(part) for part in first["loc"])
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if first["type"] == "model_type" or key == "reward":
        return f"{not_a_section(key, first['input'])}{more}"
    return explain(error, (_section(first["loc"][:-1]) or Config).model_fields, "key") + more


def not_a_section(key: str, value: Any) -> str:
    """Returns the error message for a `value` at a key that must be a section."""
    first, *_ = key.split(".")
    if first == "reward":
        name = value.get("name") if isinstance(value, Mapping) else value
        word = name if isinstance(name, str) else "exact"
        return (
            f'reward is a list, because rewards add up: write [[reward]] and below it name = "{word}", or '
            f"--set 'reward=[{{name = \"{word}\"}}]'"
        )
    section = _section(key.split("."))
    if section is None:
        return f"{key!r} is not a section"
    if issubclass(section, PluginSection) and isinstance(value, str):
        return f'{key} is a section: write {key}.name = "{value}"'
    return f"{key} is a section, not {value!r}: set its keys ({', '.join(section.model_fields)})"


def _section(path: Iterable[int | str]) -> type[BaseModel] | None:
    """Returns the pydantic model of a section, or None if there is no such section."""
    model: type[BaseModel] = Config
    for word in path:
        field = model.model_fields.get(str(word))
        kinds = [] if field is None else [field.annotation, *get_args(field.annotation)]
        models = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if not models:
            return None
        model = models[0]
    return model
