"""Atomic writing: files and folders are either complete or absent, even after a kill or on a full disk.

Everything is written under a hidden temporary name in the target's folder (same filesystem), flushed to the disk, and
renamed. A process that dies in between leaves only temporary names, which `remove_leftovers` removes at the next start.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from trimtab.files import REPLACED, TEMPORARY, readable_errors, replace_file, sync, temporary_path


def write_bytes(path: Path, data: bytes) -> None:
    """Replaces the file `path` by `data` atomically. On failure raises `TrimtabError` and keeps the old file."""
    with readable_errors(path):
        replace_file(path, data)
        sync(path.parent)


def write_output(path: Path, data: bytes) -> Path:
    """Writes a file that a command produces, with its folder if that is missing, and returns `path`."""
    with readable_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, data)
    return path


def write_text(path: Path, text: str) -> None:
    """Replaces the file `path` by `text` (UTF-8) atomically."""
    write_bytes(path, text.encode())


def remove_folder(path: Path) -> None:
    """Deletes a folder by renaming it first, so that a partly deleted folder never has its name."""
    with readable_errors(path, "remove"):
        temporary = temporary_path(path)
        path.rename(temporary)
        shutil.rmtree(temporary)


def remove_leftovers(folder: Path) -> None:
    """Completes or removes what a killed process left in `folder`. Only the process that writes there may call it."""
    if not folder.is_dir():
        return
    with readable_errors(folder, "clean up"):
        for item in list(folder.iterdir()):
            if item.name.startswith(REPLACED):
                original = item.with_name(item.name.removeprefix(REPLACED))
                if not original.exists():
                    item.rename(original)
                    continue
            elif not item.name.startswith(TEMPORARY):
                continue
            if item.is_dir():
                shutil.rmtree(item)
            else:
                item.unlink()


def append(descriptor: int, data: bytes) -> None:
    """Appends to an open file and flushes it to the disk; on an error, the file keeps its earlier content."""
    end = os.lseek(descriptor, 0, os.SEEK_END)
    try:
        while data:  # a nearly full disk accepts only a part of it
            data = data[os.write(descriptor, data) :]
        os.fsync(descriptor)
    except OSError:
        os.ftruncate(descriptor, end)
        raise
