"""Prints all recipe keys with types, defaults and descriptions, from the schema: `trimtab recipes --keys`."""

from __future__ import annotations

import inspect
import json
import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

UNLIMITED = 1e6
"""Bounds of this size or more only keep numbers representable (32-bit integers, float32, clocks) and are not shown."""
LISTS = ("reward", "eval.task")
"""Sections that a recipe may repeat; TOML writes them as `[[section]]`."""


class Key(NamedTuple):
    """One key: its type, default and description."""

    type: str
    default: str
    about: str


class Keys(NamedTuple):
    """The keys of one section. `name` is empty for keys outside of sections."""

    name: str
    about: str
    keys: dict[str, Key]

    @property
    def title(self) -> str:
        return f"[[{self.name}]]" if self.name in LISTS else f"[{self.name}]" if self.name else "Top level"


def text() -> str:
    """Returns one line for each recipe key and for each keyword of tasks, rewards and objectives."""
    from trimtab.objectives import keywords_of, objectives
    from trimtab.trainer import rewards, tasks

    blocks = [_block(section.title, section.keys) for section in sections()]
    for title, kinds in (("[task]", tasks.KINDS), ("[[reward]]", rewards.KINDS)):
        blocks += [
            _block(f'{title} name = "{name}"', keys_of(kinds.options(name), nested=True)) for name in kinds.names()
        ]
    for name in objectives():
        keys = {key: Key("", default_text(value), "") for key, value in keywords_of(name).items()}
        blocks.append(_block(f'[objective] name = "{name}"', keys))
    return "\n".join(blocks)


def sections() -> Iterator[Keys]:
    """Yields the sections that have keys, in the order of the schema."""
    from trimtab.trainer.config import REQUIRED_SECTIONS, Config

    for name, model in _models(Config):
        about = " ".join(inspect.cleandoc(model.__doc__ or "").split())
        if methods := [f"`{method}`" for method, section in REQUIRED_SECTIONS.items() if section == name]:
            about += f" Present by default with {', '.join(methods)}."
        if keys := keys_of(model.model_fields):
            yield Keys(name, about, keys)


def keys_of(fields: Mapping[str, FieldInfo], *, nested: bool = False) -> dict[str, Key]:
    """Returns the keys of a section. With `nested`, tables inside it count as keys, otherwise as separate sections."""
    keys = {}
    for name, field in fields.items():
        if nested or section_of(field.annotation) is None:
            value = None if field.is_required() else field.get_default(call_default_factory=True, validated_data={})
            default = "required" if field.is_required() else default_text(value)
            keys[field.alias or name] = Key(_type(field.annotation, field.metadata), default, field.description or "")
    return keys


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Returns the section model in a type annotation (also inside a list or an optional), or None if there is none."""
    kinds = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type)]
    return next((kind for kind in kinds if issubclass(kind, BaseModel)), None)


def _block(title: str, keys: Mapping[str, Key]) -> str:
    rows = [(f"  {name} = {key.default}", key.type, key.about) for name, key in keys.items()]
    first, second = (max((len(row[column]) for row in rows), default=0) for column in (0, 1))
    return "\n".join([title, *(f"{a:<{first}}  {b:<{second}}  {c}".rstrip() for a, b, c in rows), ""])


def _models(model: type[BaseModel], name: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    yield name, model
    for key, field in model.model_fields.items():
        if (inner := section_of(field.annotation)) is not None:
            yield from _models(inner, f"{name}.{key}" if name else key)


def _type(annotation: Any, metadata: Any = ()) -> str:
    """Returns a type annotation in the terms of TOML, with its bounds."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0], [*arguments[1:], *metadata])
    if origin in (Union, types.UnionType):
        return " or ".join(_type(kind, metadata) for kind in arguments if kind is not type(None))
    if origin is Literal:
        return ", ".join(json.dumps(value) for value in arguments)
    if origin in (list, tuple):
        fixed = origin is tuple and arguments[-1] is not ...
        return f"{f'{len(arguments)} x' if fixed else 'list of'} {_type(arguments[0])}"
    if origin is dict or section_of(annotation) is not None:
        return "table"
    names = {bool: "true or false", int: "integer", float: "number"}
    return names.get(annotation, "text") + _bounds(metadata)


def _bounds(metadata: Any) -> str:
    """Returns the bounds of a field, such as ` ≥ 0 < 1`, including those of `Field`s inside its annotation.

    Bounds of `UNLIMITED` or more are left out.
    """
    flat = [part for item in metadata for part in (item.metadata if isinstance(item, FieldInfo) else [item])]
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    bounds = [(sign, getattr(part, name)) for part in flat for name, sign in signs.items() if hasattr(part, name)]
    return "".join(f" {sign} {value:g}" for sign, value in bounds if abs(value) < UNLIMITED)


def default_text(value: Any) -> str:
    """Returns a default as TOML writes it; TOML has no null."""
    return "none" if value is None else json.dumps(value)
