"""Opens text files, plain or gzipped."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from trimtab.errors import TrimtabError, neighbors

GZIP = b"\x1f\x8b"
BOM = b"\xef\xbb\xbf"
LONGEST = 256 * 1024 * 1024
"""Largest size of a row in bytes, so that memory stays bounded; a file with a longer one is refused."""


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Opens a file for reading, decompressed if gzipped. Errors of reading are raised as `TrimtabError`."""
    try:
        with path.open("rb") as file:
            packed = file.read(2) == GZIP
            file.seek(0)
            if packed:
                with gzip.open(file, "rb") as unpacked:
                    yield unpacked  # type: ignore[misc]
            else:
                yield file
    except FileNotFoundError:
        raise TrimtabError(f"no file {path}: check the path{neighbors(path)}") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise TrimtabError(f"{path} is damaged or unfinished gzip ({error}): pack it again") from None
    except OSError as error:
        raise TrimtabError(f"cannot read {path}: {error.strerror or error}") from None
