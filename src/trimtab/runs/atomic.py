"""Atomic writing: files and folders are complete or absent whatever kills the process or fills the disk.

Everything is written under a hidden temporary name next to its goal (same filesystem), flushed to the disk, and
renamed. A process that dies in between leaves only temporary names behind, which `sweep` removes at the next start.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trimtab.errors import TrimtabError

TEMPORARY = ".trimtab-tmp-"
REPLACED = ".trimtab-old-"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_bytes(path: Path, data: bytes) -> None:
    """Replace the file `path` by `data` in one step. `TrimtabError` if the disk is full; the old file survives."""
    with explained(path):
        temporary = _temporary(path)
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        sync(path.parent)


def write_text(path: Path, text: str) -> None:
    """Replace the file `path` by `text` (UTF-8) in one step."""
    write_bytes(path, text.encode())


@contextmanager
def new_folder(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yields an empty folder to fill; it becomes `path` when the block ends without an error, else it is removed.

    With `replace` an existing `path` gives way (it stays as `.trimtab-old-<name>` if the process dies between two
    renames); without it a `path` that is not empty is an error. Errors of the disk become one line naming `path`.
    Files in it are as readable for others as the umask allows.
    """
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = _temporary(path)
        temporary.mkdir()
        try:
            yield temporary
            _as_permitted(temporary)
            for item in (*temporary.rglob("*"), temporary):
                sync(item)
            if replace and path.exists():
                _exchange(temporary, path)
            else:
                temporary.rename(path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        sync(path.parent)


def remove_folder(path: Path) -> None:
    """Delete a folder so that no half-deleted folder is ever seen under its name."""
    with explained(path, "remove"):
        doomed = _temporary(path)
        path.rename(doomed)
        shutil.rmtree(doomed)


def sweep(folder: Path) -> None:
    """Finish or undo what a killed process left in `folder`. Only for the one process that may write there."""
    if not folder.is_dir():
        return
    with explained(folder, "clean up"):
        for item in list(folder.iterdir()):
            if item.name.startswith(REPLACED):
                name = item.with_name(item.name.removeprefix(REPLACED))
                if not name.exists():
                    item.rename(name)
                    continue
            elif not item.name.startswith(TEMPORARY):
                continue
            if item.is_dir():
                shutil.rmtree(item)
            else:
                item.unlink()


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _temporary(path: Path) -> Path:
    return path.with_name(f"{TEMPORARY}{path.name}-{secrets.token_hex(4)}")


def _as_permitted(folder: Path) -> None:
    """Give every file in a folder just made the permissions of the process's umask; safetensors writes them as 0600.

    The folder shows the umask: reading it would mean setting it, for all threads.
    """
    mode = folder.stat().st_mode & 0o666
    for item in folder.rglob("*"):
        if item.is_file():
            item.chmod(mode)


def _exchange(temporary: Path, path: Path) -> None:
    replaced = path.with_name(f"{REPLACED}{path.name}")
    if replaced.exists():
        shutil.rmtree(replaced)
    path.rename(replaced)
    temporary.rename(path)
    shutil.rmtree(replaced)


@contextmanager
def explained(path: Path, verb: str = "write") -> Iterator[None]:
    """Errors of the disk become one line naming `path`."""
    try:
        yield
    except TrimtabError:
        raise
    except Exception as raised:
        error = _of_the_system(raised)
        if error is None:
            raise
        reason = error.strerror or str(error)
        advice = "free space there" if error.errno in FULL else "check that it can be written"
        raise TrimtabError(f"cannot {verb} {path}: {reason}; {advice}, or choose another place") from raised


def _of_the_system(error: Exception) -> OSError | None:
    """What libraries written in Rust (safetensors, tokenizers) say of the disk in an exception of their own."""
    if isinstance(error, OSError):
        return error
    code = re.search(r"(.*) \(os error (\d+)\)", str(error))
    return OSError(int(code[2]), code[1]) if code else None
