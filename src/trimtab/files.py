"""Reads what users name: regular files only, with bounds on nesting and on the length of a row."""

from __future__ import annotations

import errno
import gzip
import json
import os
import stat
import tomllib
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from trimtab.errors import TrimtabError, neighbors

if TYPE_CHECKING:
    import pyarrow.parquet as pq

MAX_ROW_VALUES = 1 << 24
"""Largest number of values in one list of a parquet file. A response of as many tokens takes about 600 MB."""


def regular_file(path: Path) -> Path:
    """Returns `path` if a regular file can be opened there.

    Raises `OSError`, also for what `open` would accept and then wait for or read for ever: a named pipe or a device.
    """
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return path


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Opens a file for reading, decompressed if gzipped. Errors of reading are raised as `TrimtabError`."""
    try:
        with regular_file(path).open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            yield gzip.GzipFile(fileobj=file) if packed else file  # type: ignore[misc]
    except FileNotFoundError:
        raise TrimtabError(f"no file {path}: check the path{neighbors(path)}") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise TrimtabError(f"{path} is damaged or unfinished gzip ({error}): pack it again") from None
    except OSError as error:
        raise TrimtabError(f"cannot read {path}: {error.strerror or error}") from None


def parse_toml(text: str) -> dict[str, Any]:
    """Parses TOML. Raises `tomllib.TOMLDecodeError`, also for values nested too deeply, and `ValueError`."""
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


def too_long(path: Path, column: str, values: int, rows: int) -> TrimtabError:
    """Returns the error for a column of a parquet file with `values` values in so few `rows`."""
    return TrimtabError(
        f"{path}: column {column!r} holds {values:,} values in {rows:,} rows; a row may hold {MAX_ROW_VALUES:,}: "
        "leave the file out, or write the column again"
    )


@contextmanager
def open_parquet(path: Path) -> Iterator[pq.ParquetFile]:
    """Opens a parquet file for the block.

    Raises `TrimtabError` for rows of more than `MAX_ROW_VALUES` values, before any is read: a file of a kilobyte can
    hold a list of 10^8 equal values. Other errors are those of pyarrow.
    """
    import pyarrow.parquet as pq

    with pq.ParquetFile(regular_file(path), pre_buffer=False) as file:
        for group in (file.metadata.row_group(index) for index in range(file.metadata.num_row_groups)):
            for column in (group.column(index) for index in range(group.num_columns)):
                if column.num_values > MAX_ROW_VALUES * group.num_rows:
                    name = column.path_in_schema.split(".")[0]
                    raise too_long(path, name, column.num_values, group.num_rows)
        yield file
