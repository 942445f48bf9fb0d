"""The page of all recipe keys, from the schema: `trimtab recipes --keys`."""

from __future__ import annotations

import inspect
import json
import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

UNLIMITED = 1e6
"""Bounds from here on only keep numbers representable (32-bit integers, float32, clocks) and are not documented."""

HEAD = """# Recipes: every key

A recipe is a TOML file, or the same as a mapping in Python. What ships with the package is listed by `trimtab recipes`;
`trimtab show RECIPE` prints one with every default filled in. `trimtab recipes --keys` prints this page.

```toml
base = "quickstart"           # start from this recipe; everything below changes it

[task]                        # a section
name = "file"                 # other keys of this section are those of the task named
path = "train.jsonl"

[objective]
name = "icepop"
weight_max = 3.0

[[reward]]                    # one of a list of rewards
name = "math"

[trainer]
steps = 100
```

- `--set section.key=value` changes one key on the command line: `--set engine.vllm.memory=0.8`. A value is TOML; a bare
  word is text. `--set base=laboratory` changes the base.
- `base` names a shipped recipe or a `.toml` file. A section of the recipe changes the same section of its base key by
  key; an objective or a task of another name, and a surrogate of another kind, start from their own defaults instead.
- `unset = ["objective.clip_high", "prefix"]` takes keys and sections of the base back, where a message says to leave
  one out that the base sets; on the command line also `--set unset=prefix`.
- A path in a recipe file is relative to that file, one on the command line to the current folder.
- Unknown keys, values out of bounds and most keys without effect are refused in one line, before a model is loaded.
- The defaults below are those of the schema. What a run used, with everything resolved, is its `config.toml`.
- "none" means that the key is absent; TOML has no null.
"""

METHODS = """## Objectives: the keywords of `[objective]`

What they mean: [methods](methods.md); `trimtab explain NAME` prints the equation. `clip_low`, `clip_high` are the eps
of `[1 - clip_low, 1 + clip_high]`, `clip_dual` is the bound for negative advantages; `weight_*` bound the importance
weight and `keep_*` the ratio that decides what is rejected, all of them the ratio itself; `normalize` divides weights
by their mean.

All take `denominator` (`original` or `kept`), `kl` (`k1`, `k2`, `k3`, `unbiased`) with `kl_coef`, and `entropy_coef`;
all with an aggregation in the table take `aggregation` (`token-mean`, `seq-mean-token-mean`, `seq-mean-token-sum`, or
`constant` with `length_max`).
"""


class Key(NamedTuple):
    """One key: its type, default and description."""

    type: str
    default: str
    about: str


def markdown() -> str:
    """Returns the whole page."""
    return "\n".join([HEAD, *_section_blocks(), METHODS + "\n" + _objectives(), _tasks(), _rewards()])


def _sections(model: type[BaseModel], name: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    yield name, model
    for key, field in model.model_fields.items():
        inner = section_of(field.annotation)
        if inner is not None:
            yield from _sections(inner, f"{name}.{key}" if name else key)


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Returns the section model in a type annotation, also of lists and optional sections; None for other keys."""
    kinds = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type)]
    return next((kind for kind in kinds if issubclass(kind, BaseModel)), None)


def _keys_of(fields: Mapping[str, FieldInfo], *, nested: bool = False) -> dict[str, Key]:
    """Returns the keys of a section. `nested`: tables inside are keys; otherwise they are sections of their own."""
    return {
        field.alias or name: Key(_type(field.annotation, field.metadata), _default(field), field.description or "")
        for name, field in fields.items()
        if nested or section_of(field.annotation) is None
    }


def _type(annotation: Any, metadata: Any = ()) -> str:
    """Returns a type in the terms of TOML, with its bounds."""
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        return _type(inner, [*more, *metadata])
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(_type(kind, metadata) for kind in get_args(annotation) if kind is not type(None))
    arguments = get_args(annotation)
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if get_origin(annotation) in (list, tuple):
        fixed = get_origin(annotation) is tuple and arguments[-1] is not ...
        return f"{f'{len(arguments)} x' if fixed else 'list of'} {_type(arguments[0])}"
    if get_origin(annotation) is dict or section_of(annotation) is not None:
        return "table"
    names = {bool: "true or false", int: "integer", float: "number"}
    return names.get(annotation, "text") + _bounds(metadata)


def _bounds(metadata: Any) -> str:
    """Returns bounds such as ` ≥ 0 < 1` from the constraints of a field and of the `Field`s inside its annotation.

    Bounds of `UNLIMITED` and more are left out.
    """
    flat = [part for item in metadata for part in (item.metadata if isinstance(item, FieldInfo) else [item])]
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    bounds = [(sign, getattr(part, name)) for part in flat for name, sign in signs.items() if hasattr(part, name)]
    return "".join(f" {sign} {value:g}" for sign, value in bounds if abs(value) < UNLIMITED)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    return "none" if value is None else f"`{json.dumps(value)}`"


def _section_blocks() -> Iterator[str]:
    from trimtab.config import REQUIRED_SECTIONS, Config

    for name, model in _sections(Config):
        about = [" ".join(inspect.cleandoc(model.__doc__ or "").split())]
        methods = [f"`{method}`" for method, section in REQUIRED_SECTIONS.items() if section == name]
        if methods:
            about.append(f"Present by default with {', '.join(methods)}.")
        title = "Top level" if not name else f"`[[{name}]]`" if name in ("reward", "eval.task") else f"`[{name}]`"
        rows = _keys_of(model.model_fields)
        if rows:
            yield f"## {title}\n\n{' '.join(about)}\n\n{_table(rows)}"


def _objectives() -> str:
    from trimtab.objectives import keywords_of, objectives

    shared = {"denominator", "kl", "kl_coef", "entropy_coef", "aggregation", "length_max"}
    lines = ["| `name` | its own keywords | aggregation |", "|---|---|---|"]
    for name in objectives():
        keywords = keywords_of(name)
        own = ", ".join(f"`{key} = {_value(value)}`" for key, value in keywords.items() if key not in shared)
        length_max = f", `length_max = {keywords['length_max']}`" if keywords.get("length_max") else ""
        lines.append(f"| `{name}` | {own or '-'} | {keywords.get('aggregation', '-')}{length_max} |")
    return "\n".join(lines) + "\n"


def _tasks() -> str:
    from trimtab import tasks

    blocks = ["## Tasks: the keywords of `[task]`\n\nWhat they mean in prose, with examples: [tasks](tasks.md).\n"]
    blocks += [
        f'### `name = "{name}"`\n\n{_table(_keys_of(tasks.options(name), nested=True))}' for name in tasks.names()
    ]
    return "\n".join(blocks)


def _rewards() -> str:
    from trimtab import rewards

    blocks = [
        "## Rewards: the keywords of `[[reward]]`\n\nBeside `name`, `weight` and `timeout`. Without any `[[reward]]` "
        "the task's own reward is used. A `module:function` of your own takes no keywords.\n"
    ]
    blocks += [
        f'### `name = "{name}"`\n\n{_table(_keys_of(rewards.options(name), nested=True))}' for name in rewards.names()
    ]
    return "\n".join(blocks)


def _value(value: Any) -> str:
    return "none" if value is None else json.dumps(value)


def _table(rows: Mapping[str, Key]) -> str:
    lines = ["| key | type | default | what it is |", "|---|---|---|---|"]
    for name, row in rows.items():
        lines.append(f"| `{name}` | {row.type} | {row.default} | {_cell(row.about)} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    # In Markdown `<name>` is a tag and a bar ends the cell.
    return text.replace("|", "\\|").replace("<", "&lt;")
