"""Atomic writing: files and folders are either complete or absent, even after a kill or on a full disk.

Everything is written under a hidden temporary name in the target's folder (same filesystem), flushed to the disk, and
renamed. A process that dies in between leaves only temporary names behind, which `remove_leftovers` removes at the next
start.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trimtab.files import TEMPORARY, readable_errors, replace_file, sync, temporary_path

REPLACED = ".trimtab-old-"


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


@contextmanager
def new_folder(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yields an empty folder that is renamed to `path` if the block ends without an error, and removed otherwise.

    With `replace` an existing `path` is replaced (it remains as `.trimtab-old-<name>` if the process dies between the
    two renames); without it a `path` that is not empty is an error. The files get the permissions of the umask.
    Raises `TrimtabError`, naming `path`, for errors of the disk.
    """
    with readable_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_path(path)
        temporary.mkdir()
        try:
            yield temporary
            _apply_umask(temporary)
            for item in (*temporary.rglob("*"), temporary):
                sync(item)
            if replace and path.exists():
                replaced = path.with_name(f"{REPLACED}{path.name}")
                if replaced.exists():
                    shutil.rmtree(replaced)
                path.rename(replaced)
                temporary.rename(path)
                shutil.rmtree(replaced)
            else:
                temporary.rename(path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        sync(path.parent)


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


def _apply_umask(folder: Path) -> None:
    """Sets the permissions of all files in a new folder by the umask; safetensors creates files as 0600.

    The umask is taken from the mode of the folder, since the umask itself can only be read by setting it, for all
    threads.
    """
    mode = folder.stat().st_mode & 0o666
    for item in folder.rglob("*"):
        if item.is_file():
            item.chmod(mode)
