"""The interface of one file as a table: column names, and rows in bounded blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from trimtab.diagnosis.reading.ragged import Block
from trimtab.diagnosis.reading.read_counts import Tally


class Table(Protocol):
    """A file. `names` is cheap where the format allows; `blocks` takes column names by role."""

    path: Path

    def names(self) -> frozenset[str]: ...

    def close(self) -> None: ...

    def blocks(self, columns: Mapping[str, str], tokens: int, tally: Tally) -> Iterator[Block]: ...
