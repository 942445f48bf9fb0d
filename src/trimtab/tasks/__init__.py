"""Tasks: `build(name, **options) -> Task`, one file per kind; see docs/tasks.md."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from trimtab.errors import TrimtabError, did_you_mean, explain
from trimtab.types import Problem, Prompt, Task

_KINDS = {
    "arithmetic": "trimtab.tasks.arithmetic",
    "sort": "trimtab.tasks.sort",
    "swap-sort": "trimtab.tasks.swap_sort",
    "program": "trimtab.tasks.program",
    "reasoning-gym": "trimtab.tasks.reasoning_gym",
    "file": "trimtab.tasks.file",
    "hf": "trimtab.tasks.hub",
    "mixture": "trimtab.tasks.mixture",
}


def names() -> list[str]:
    """Returns the names of all kinds of tasks."""
    return sorted(_KINDS)


def build(name: str, **options: Any) -> Task:
    """Returns the task `name`; `options` are the fields of `Options` in its file.

    Raises `TrimtabError`: an unknown name or option (naming the nearest), a bad value, unusable data.
    """
    kind = _module(name)
    try:
        checked = kind.Options(**options)
    except ValidationError as error:
        raise TrimtabError(f"task {name!r}: {explain(error, _fields(kind))}") from None
    return kind.build(checked)


def encode(task: Task, problem: Problem, tokenizer: Any) -> Prompt:
    """Returns the encoded prompt. Special tokens are part of the task's text, never added by the tokenizer.

    Raises `TrimtabError` for a prompt without tokens.
    """
    text = task.prompt_text(problem, tokenizer)
    ids = np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int64)
    if len(ids) == 0:
        raise TrimtabError(f"task {task.name!r}, problem {problem.id!r}: the prompt is empty; check its template")
    return Prompt(problem=problem, text=text, ids=ids)


def options(name: str) -> dict[str, FieldInfo]:
    """Returns type, default and description of every option, for help texts and `trimtab recipes --keys`."""
    return _fields(_module(name))


def _module(name: str) -> Any:
    if name not in _KINDS:
        raise TrimtabError(f"unknown task {name!r}{did_you_mean(name, names())}")
    return importlib.import_module(_KINDS[name])


def _fields(module: Any) -> dict[str, FieldInfo]:
    return {field.alias or key: field for key, field in module.Options.model_fields.items()}
