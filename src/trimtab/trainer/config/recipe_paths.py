"""Paths in recipes: those in a file are relative to its folder, all others to the current one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trimtab.errors import TrimtabError

# Keys of paths, each with values that are names instead. `out` is missing because it is relative to the current folder,
# like `--out`.
PATH_KEYS = {
    "task.path": (),
    "task.test_path": (),
    "demonstrations.path": ("gold",),
    "engine.server.folder": (),
}
LABORATORY_MODELS = ("laboratory", "laboratory-moe", "laboratory-switch", "laboratory-tools", "laboratory-long")
# Keys that hold a name (of a shipped model, or on the hub) or a folder.
NAMES_OR_FOLDERS = {
    "model.path": ("smollm2-135m-instruct", *LABORATORY_MODELS),
    "model.reference": ("smollm2-135m-instruct", *LABORATORY_MODELS),
    "task.dataset": (),
}
TASK_LISTS = ("eval.task", "task.part")
"""Lists of tasks, which have the paths of `[task]`."""


def resolve_paths(data: Mapping[str, Any], folder: Path, prefix: str = "") -> dict[str, Any]:
    """Returns a recipe's `data`, or its part below the key `prefix`, with paths resolved against `folder`.

    A model or data set is a folder if it begins with `/`, `.` or `~`, has more than one `/`, or exists as a folder; any
    other value, such as `Qwen/Qwen2.5-0.5B`, is a name and unchanged. A data set of a single word is always a name,
    because tasks other than `hf` have data sets that are not files.
    """
    resolved = dict(data)
    for name, value in data.items():
        key = prefix + name
        if isinstance(value, Mapping):
            resolved[name] = resolve_paths(value, folder, f"{key}.")
        elif isinstance(value, str) and _is_path(key, value, folder):
            resolved[name] = str(_absolute(value, folder))
        elif isinstance(value, list) and key in TASK_LISTS:
            tasks = (resolve_paths({"task": task}, folder)["task"] for task in value)
            resolved[name] = list(tasks)
    return resolved


def resolve_path(key: str, value: Any, folder: Path) -> Any:
    """Returns the value of one dotted key with an absolute path, as `resolve_paths` does."""
    section, dot, name = key.rpartition(".")
    return resolve_paths({name: value}, folder, section + dot)[name]


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
    # One spelling of `folder`, so that a resumed run reads the same; symbolic links in `value` are kept.
    return Path(os.path.normpath(folder.resolve() / expanded))
