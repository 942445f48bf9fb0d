"""Resolves paths in recipes: relative to the recipe's file, or with `--set` to the current folder."""

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
    "task.scores": (),
    "demonstrations.path": ("gold",),
    "engine.server.folder": (),
}
# Keys that hold a name (of a shipped model, or on the hub) or a folder.
NAMES_OR_FOLDERS = {
    "model.path": (
        "smollm2-135m-instruct",
        "laboratory",
        "laboratory-moe",
        "laboratory-switch",
        "laboratory-tools",
    ),
    "task.dataset": (),
}


def resolve_paths(data: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Returns a recipe's `data` with absolute paths; relative ones are resolved against `folder`.

    A model or data set is a folder if it begins with `/`, `.` or `~`, has more than one `/`, or exists as a folder; any
    other value, such as `Qwen/Qwen2.5-0.5B`, is a name and unchanged. A data set of a single word is always a name,
    because tasks other than `hf` have data sets that are no files.
    """
    resolved = dict(data)
    for key, names in {**PATH_KEYS, **NAMES_OR_FOLDERS}.items():
        value = _value_at(resolved, key.split("."))
        if isinstance(value, str) and value not in names and (key in PATH_KEYS or _is_folder(key, value, folder)):
            resolved = _with_value(resolved, key.split("."), str(_absolute(value, folder)))
    for words in (["eval", "task"], ["task", "part"]):  # lists of tasks, which have the paths of [task]
        others = _value_at(resolved, words)
        if isinstance(others, list):
            tasks = [resolve_paths({"task": other}, folder)["task"] for other in others]
            resolved = _with_value(resolved, words, tasks)
    return resolved


def resolve_path(key: str, value: Any, folder: Path) -> Any:
    """Returns the value of one dotted key with an absolute path, as `resolve_paths` does."""
    words = key.split(".")
    data = value
    for word in reversed(words):
        data = {word: data}
    return _value_at(resolve_paths(data, folder), words)


def is_written_as_path(value: str) -> bool:
    """Whether a model's name can only be a folder."""
    return value.startswith(("/", ".", "~")) or value.count("/") > 1


def _is_folder(key: str, value: str, folder: Path) -> bool:
    is_one_word = key == "task.dataset" and "/" not in value
    return is_written_as_path(value) or (not is_one_word and _absolute(value, folder).is_dir())


def _absolute(value: str, folder: Path) -> Path:
    try:
        expanded = Path(value).expanduser()
    except RuntimeError:
        raise TrimtabError(f"path {value!r}: there is no such user; write the folder out") from None
    # One spelling of `folder`, so that a resumed run reads the same; symbolic links in `value` are kept.
    return Path(os.path.normpath(folder.resolve() / expanded))


def _value_at(data: Any, words: list[str]) -> Any:
    for word in words:
        data = data.get(word) if isinstance(data, Mapping) else None
    return data


def _with_value(data: Mapping[str, Any], words: list[str], value: Any) -> dict[str, Any]:
    first, *rest = words
    return {**data, first: _with_value(data[first], rest, value) if rest else value}
