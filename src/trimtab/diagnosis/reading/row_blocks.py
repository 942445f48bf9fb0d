"""Reads files of Python rows (JSON, CSV), a bounded number of tokens at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from trimtab.diagnosis.reading.cells import as_list
from trimtab.diagnosis.reading.ragged import RowBlock, build_block
from trimtab.diagnosis.reading.read_counts import ReadCounts

Rows = Iterator[tuple[int, dict[str, Any]]]
"""Numbers, from 1, and contents of the usable rows; the others are counted."""

_ROWS_FOR_NAMES = 16  # rows whose keys define the columns


class RowTable:
    """A file of Python rows, which the function `read` yields."""

    def __init__(self, path: Path, read: Callable[[Path, ReadCounts], Rows]) -> None:
        self.path = path
        self._read = read

    def names(self) -> frozenset[str]:
        """Returns the columns. One that is null in all the first rows is none: writers put null for what is unknown."""
        every: set[str] = set()
        known: set[str] = set()
        for _, row in islice(self._read(self.path, ReadCounts()), _ROWS_FOR_NAMES):
            every |= row.keys()
            known |= {name for name, value in row.items() if value is not None}
        return frozenset(known or every)

    def close(self) -> None:
        """Does nothing: no data is kept between calls."""

    def blocks(self, columns: Mapping[str, str], tokens: int, tally: ReadCounts) -> Iterator[RowBlock]:
        rows: list[dict[str, Any]] = []
        numbers: list[int] = []
        number = size = 0
        behavior_name = columns["logp_behavior"]
        for number, whole in self._read(self.path, tally):
            row = {name: whole.get(name) for name in columns.values()}
            row[behavior_name] = as_list(row[behavior_name])
            row = _without_batch(row, behavior_name)
            rows.append(row)
            numbers.append(number)
            behavior = row[behavior_name]
            size += len(behavior) if isinstance(behavior, list) else 1
            if size >= tokens:
                yield _block(rows, columns, numbers)
                rows, numbers, size = [], [], 0
        if rows:
            yield _block(rows, columns, numbers)
        if not number:
            tally.no_rows += 1


def _without_batch(row: dict[str, Any], behavior: str) -> dict[str, Any]:
    """Returns the row of a batch of one, as NeMo-RL writes it, without the list around each of its values."""
    lists = row[behavior]
    if not (isinstance(lists, list) and len(lists) == 1 and isinstance(lists[0], list)):
        return row
    return {name: value[0] if isinstance(value, list) and len(value) == 1 else value for name, value in row.items()}


def _block(rows: list[dict[str, Any]], columns: Mapping[str, str], numbers: list[int]) -> RowBlock:
    return build_block({role: [row[name] for row in rows] for role, name in columns.items()}, numbers)
