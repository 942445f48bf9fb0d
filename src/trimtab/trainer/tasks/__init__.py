"""Tasks: `build(name, **options) -> Task`, a class per kind with options as fields; see docs/reference-tasks.md."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any, cast

import numpy as np
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from trimtab.errors import TrimtabError, did_you_mean, explain
from trimtab.trainer.tasks.task import TaskOptions
from trimtab.types import Problem, Prompt, Task

_KINDS = {
    "arithmetic": ("arithmetic", "Arithmetic"),
    "file": ("data_sets", "File"),
    "hf": ("data_sets", "HuggingFace"),
    "mixture": ("mixture", "MixtureOptions"),
    "reasoning-gym": ("reasoning_gym", "ReasoningGym"),
    "sort": ("laboratory_tasks", "Sort"),
    "swap-sort": ("laboratory_tasks", "SwapSort"),
}


def names() -> list[str]:
    """Returns the names of all kinds of tasks."""
    return sorted(_KINDS)


def build(name: str, **keywords: Any) -> Task:
    """Returns the task `name`; the keywords are the fields of its class.

    Raises `TrimtabError`: an unknown name or option (naming the nearest), a bad value, unusable data.
    """
    kind = _kind(name)
    try:
        checked = kind(**keywords)
    except ValidationError as error:
        raise TrimtabError(f"task {name!r}: {explain(error, options(name))}") from None
    return checked.build()


def with_max_tokens(task: Task, max_tokens: int | None) -> Task:
    """Returns the task with another length limit; None: its own."""
    return replace(cast(Any, task), max_tokens=max_tokens) if max_tokens else task


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
    return {field.alias or key: field for key, field in _kind(name).model_fields.items()}


def _kind(name: str) -> type[TaskOptions]:
    """Returns the class whose fields are the options of a kind of task; only its module is imported."""
    if name not in _KINDS:
        raise TrimtabError(f"unknown task {name!r}{did_you_mean(name, names())}; 'file' reads problems of your own")
    module, kind = _KINDS[name]
    return getattr(importlib.import_module(f"trimtab.trainer.tasks.{module}"), kind)
