"""Errors of pydantic about a recipe, as one line with the key and what to write instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from trimtab.errors import explain, first_problem
from trimtab.trainer.config.schema import Config
from trimtab.trainer.config.section import PluginSection


def explain_first(error: ValidationError) -> str:
    """Returns the first problem that pydantic reports, and the number of the others, in one line."""
    first = first_problem(error)
    key = ".".join(str(part) for part in first["loc"])
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if first["type"] == "model_type" or key == "reward":
        return f"{not_a_section(key, first['input'])}{more}"
    return explain(error, (_section(first["loc"][:-1]) or Config).model_fields, "key") + more


def not_a_section(key: str, value: Any) -> str:
    """Returns the message for a `value` at a key where a section belongs."""
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
    """Returns the pydantic model of a section, None if there is no such section."""
    model: type[BaseModel] = Config
    for word in path:
        field = model.model_fields.get(str(word))
        kinds = [] if field is None else [field.annotation, *get_args(field.annotation)]
        models = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if not models:
            return None
        model = models[0]
    return model
