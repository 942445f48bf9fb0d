"""For readers and writers of files: safe opening, limits on rows and on decompressed data, and atomic writing.

The limits keep memory use at a few gigabytes whatever a file contains. `TRIMTAB_FILE_LIMITS=4` in the environment
multiplies all of them by 4, for files that need more.
"""

from __future__ import annotations

import errno
import gzip
import io
import json
import math
import os
import re
import secrets
import shutil
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from trimtab.errors import TrimtabError, neighbors

if TYPE_CHECKING:
    import pyarrow.parquet as pq

MAX_ROW_VALUES = 1 << 24
"""Largest number of values in one row of any column of a parquet file."""
MAX_RESPONSE = 1 << 22
"""Largest number of tokens of a response in a diagnosis. A response of this length takes about 1 GB of memory."""
MAX_ROW_BYTES = 256 << 20
"""Largest size of a row of JSON or CSV."""
MAX_ARRAY_BYTES = 512 << 20
"""Largest size of a JSON array, which is held in memory."""
MAX_SCALARS_BYTES = 256 << 20
"""Largest size of a file of scalars, which is held in memory."""
MAX_UNPACKED_BYTES, MAX_UNPACKED_TIMES = 64 << 20, 100
"""A compressed file may unpack to the first number of bytes, or to the second number times its own size if more.
Log-probs as text compress by a factor of 2 to 20."""
LIMITS = "TRIMTAB_FILE_LIMITS"
RAISE_LIMITS = f"{LIMITS}=4 in the environment allows four times as much"
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
TEMPORARY = ".trimtab-tmp-"
"""Prefix of the names of files and folders that are being written."""
REPLACED = ".trimtab-old-"
"""Prefix of the name of a folder that is being replaced."""


def limit(bound: int) -> int:
    """Returns a bound, multiplied by the environment variable `TRIMTAB_FILE_LIMITS` if it is set.

    Raises `TrimtabError` if the variable is not a number from 1 to 1e6.
    """
    given = os.environ.get(LIMITS, "1")
    try:
        factor = float(given)
    except ValueError:
        factor = math.nan
    if not 1 <= factor <= 1e6:
        raise TrimtabError(f"{LIMITS}={given!r} is not a number from 1 to 1e6: set one, or unset it")
    return int(bound * factor)


def natural_key(text: str) -> list[tuple[bool, int, str]]:
    """Returns a sort key that orders numbers by value (seed2 before seed10) and before words."""
    parts = re.split(r"(\d+)", text)
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]


def regular_file(path: Path) -> Path:
    """Returns `path` if a regular file can be opened there.

    Raises `OSError` otherwise, also for a named pipe or a device: reading from these may block or never end.
    """
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return path


def sync(path: Path) -> None:
    """Flushes a file, or the list of entries of a folder, to the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temporary_path(path: Path) -> Path:
    """Returns a new hidden path in the folder of `path`: write there, then rename to `path`."""
    return path.with_name(f"{TEMPORARY}{path.name}-{secrets.token_hex(4)}")


def replace_file(path: Path, data: bytes) -> None:
    """Replaces a file by `data` atomically: readers find the old or the new content, also if the process is killed.

    Raises `OSError` and then leaves the old file unchanged. Does not flush the folder: use `sync` for that.
    """
    temporary = temporary_path(path)
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def readable_errors(path: Path, verb: str = "write") -> Iterator[None]:
    """Turns disk errors inside the block into one-line `TrimtabError`s that name `path`."""
    try:
        yield
    except TrimtabError:
        raise
    except Exception as original:
        error = _as_os_error(original)
        if error is None:
            raise
        reason = error.strerror or str(error)
        advice = "free space there" if error.errno in DISK_FULL else "check that it can be written"
        advice = f"{advice}, or choose another folder" if verb in ("write", "create") else "check the permissions there"
        raise TrimtabError(f"cannot {verb} {path}: {reason}; {advice}") from original


def _as_os_error(error: Exception) -> OSError | None:
    """Returns the `OSError` behind an exception, or None.

    Libraries written in Rust (safetensors, tokenizers) report disk errors in other exceptions.
    """
    if isinstance(error, OSError):
        return error
    code = re.search(r"(.*) \(os error (\d+)\)", str(error))
    return OSError(int(code[2]), code[1]) if code else None


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


def _apply_umask(folder: Path) -> None:
    """Sets the permissions of all files in a new folder by the umask; safetensors creates files as 0600.

    The umask is taken from the mode of the folder, since the umask itself is read only by setting it, for all threads.
    """
    mode = folder.stat().st_mode & 0o666
    for item in folder.rglob("*"):
        if item.is_file():
            item.chmod(mode)


class Unpacked(io.RawIOBase):
    """The content of a gzipped file, as a stream. Raises `TrimtabError` if it is many times larger than the file."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
        self._file, self._path, self._size = gzip.GzipFile(fileobj=file), path, 0
        self._most = max(limit(MAX_UNPACKED_BYTES), limit(MAX_UNPACKED_TIMES) * os.fstat(file.fileno()).st_size)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._file.readinto(buffer)
        self._size += count
        if self._size > self._most:
            raise too_large_unpacked(self._path, self._size)
        return count


def too_large_unpacked(path: Path, size: int) -> TrimtabError:
    """Returns the error for a compressed file whose content has at least `size` bytes, which is too many."""
    return TrimtabError(
        f"{path} unpacks to over {MAX_UNPACKED_TIMES} times its size ({size >> 20} MB so far): unpack it first, or "
        f"{RAISE_LIMITS}"
    )


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Opens a file for reading, decompressed if gzipped. Raises `TrimtabError` if it cannot be read."""
    try:
        with regular_file(path).open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            yield io.BufferedReader(Unpacked(file, path), 1 << 16) if packed else file
    except FileNotFoundError:
        raise TrimtabError(f"no file {path}: check the path{neighbors(path)}") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise TrimtabError(f"{path} is damaged or unfinished gzip ({error}): pack it again") from None
    except OSError as error:
        raise TrimtabError(f"cannot read {path}: {error.strerror or error}") from None


def parse_toml(text: str) -> dict[str, Any]:
    """Parses TOML. Raises `tomllib.TOMLDecodeError`, or another `ValueError` for a number with too many digits."""
    import tomllib  # of Python 3.11

    try:
        return tomllib.loads(text)
    except RecursionError:
        raise tomllib.TOMLDecodeError("values are nested too deeply") from None


def parse_json(text: str | bytes) -> Any:
    """Parses JSON. Raises `ValueError`, also for values nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("values are nested too deeply") from None


def too_long(path: Path, column: str, values: int, rows: int, most: int) -> TrimtabError:
    """Returns the error for a column with too many `values` for its `rows`. most: the largest number per row."""
    return TrimtabError(
        f"{path}: column {column!r} holds {values:,} values in {rows:,} rows; a row may hold {most:,}: leave the file "
        f"out, write the column again, or {RAISE_LIMITS}"
    )


@contextmanager
def open_parquet(path: Path) -> Iterator[pq.ParquetFile]:
    """Opens a parquet file for the block.

    Raises `TrimtabError`, before any value is read, if a column has more than `MAX_ROW_VALUES` values per row: a file
    of one kilobyte can hold a list of 10^8 equal values. pyarrow's errors are raised unchanged.
    """
    import pyarrow.parquet as pq

    with pq.ParquetFile(regular_file(path), pre_buffer=False) as file:
        for group in (file.metadata.row_group(index) for index in range(file.metadata.num_row_groups)):
            for column in (group.column(index) for index in range(group.num_columns)):
                if column.num_values > limit(MAX_ROW_VALUES) * group.num_rows:
                    name = column.path_in_schema.split(".")[0]
                    raise too_long(path, name, column.num_values, group.num_rows, limit(MAX_ROW_VALUES))
        yield file
