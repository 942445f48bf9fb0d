"""Resolves paths in recipes: relative to the recipe's file, or with `--set` to the current folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trimtab.errors import TrimtabError

# Keys that hold a path, each with the words that are names there. `out` is none of them: where a run goes is, like
# `--out`, relative to the current folder.
FILES = {"task.path": (), "task.test_path": (), "expert.path": ("gold",), "engine.server.folder": ()}
# Keys that hold a name (of a shipped model, or on the hub) or a folder.
NAMES_OR_FOLDERS = {
    "model.path": ("smollm2-135m-instruct", "laboratory", "laboratory-moe", "laboratory-switch"),
    "task.dataset": (),
}


def located(data: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """A recipe's `data` with absolute paths, relative ones being relative to `folder`.

    A model or data set is a folder if it is written as one (it begins with `/`, `.` or `~`, or holds more than one
    `/`) or there is such a folder; all else, such as `Qwen/Qwen2.5-0.5B`, is a name and stays as it is. A data set of
    one bare word is a name in any case: other tasks than `hf` have data sets that are no files.
    """
    found = dict(data)
    for key, names in {**FILES, **NAMES_OR_FOLDERS}.items():
        value = _at(found, key.split("."))
        if isinstance(value, str) and value not in names and (key in FILES or _is_folder(key, value, folder)):
            found = _with(found, key.split("."), str(_absolute(value, folder)))
    return found


def located_at(key: str, value: Any, folder: Path) -> Any:
    """The same for the value of one dotted key."""
    words = key.split(".")
    data = value
    for word in reversed(words):
        data = {word: data}
    return _at(located(data, folder), words)


def is_written_as_path(value: str) -> bool:
    """Whether a model's name can only be a folder."""
    return value.startswith(("/", ".", "~")) or value.count("/") > 1


def _is_folder(key: str, value: str, folder: Path) -> bool:
    bare = key == "task.dataset" and "/" not in value
    return is_written_as_path(value) or (not bare and _absolute(value, folder).is_dir())


def _absolute(value: str, folder: Path) -> Path:
    try:
        expanded = Path(value).expanduser()
    except RuntimeError:
        raise TrimtabError(f"path {value!r}: there is no such user; write the folder out") from None
    # One spelling whatever the folder was called by, so that a resumed run sees the same; links in `value` stay.
    return Path(os.path.normpath(folder.resolve() / expanded))


def _at(data: Any, words: list[str]) -> Any:
    for word in words:
        data = data.get(word) if isinstance(data, Mapping) else None
    return data


def _with(data: Mapping[str, Any], words: list[str], value: Any) -> dict[str, Any]:
    first, *rest = words
    return {**data, first: _with(data[first], rest, value) if rest else value}
