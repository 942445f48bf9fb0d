"""Tasks: `build(name, **options)` returns a `Task`. Each kind is a class, whose fields are the options of the task."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np

from trimtab.errors import TrimtabError
from trimtab.trainer.registry import Registry
from trimtab.types import Problem, Prompt, Task

KINDS = Registry(
    "task",
    {
        "arithmetic": "tasks.generated:Arithmetic",
        "file": "tasks.data_sets:File",
        "hf": "tasks.data_sets:HuggingFace",
        "mixture": "tasks.mixture:MixtureOptions",
        "reasoning-gym": "tasks.generated:ReasoningGym",
        "sort": "tasks.generated:Sort",
        "swap-sort": "tasks.generated:SwapSort",
    },
    "'file' reads problems of your own",
)


def build(name: str, **keywords: Any) -> Task:
    """Returns the task `name`; the keywords are the fields of its options class.

    Raises `TrimtabError` for an unknown name or option (suggesting the nearest), a bad value, or unusable data.
    """
    return KINDS.read(name, keywords).build()


def with_max_tokens(task: Task, max_tokens: int | None) -> Task:
    """Returns the task with `max_tokens` as its response limit; None keeps the limit of the task."""
    return replace(cast(Any, task), max_tokens=max_tokens) if max_tokens else task


def encode(task: Task, problem: Problem, tokenizer: Any) -> Prompt:
    """Returns the encoded prompt. The text contains its special tokens; the tokenizer adds none.

    Raises `TrimtabError` if the prompt has no tokens.
    """
    text = task.prompt_text(problem, tokenizer)
    ids = np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int64)
    if len(ids) == 0:
        raise TrimtabError(f"task {task.name!r}, problem {problem.id!r}: the prompt is empty; check its template")
    return Prompt(problem=problem, text=text, ids=ids)
