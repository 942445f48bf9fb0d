"""Reads files of Python rows (JSON, CSV), a bounded number of tokens at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from trimtab.diagnosis.reading.ragged import RowBlock, build_block, python_fields, python_lists
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
        names: set[str] = set()
        for _, row in islice(self._read(self.path, ReadCounts()), _ROWS_FOR_NAMES):
            names |= row.keys()
        return frozenset(names)

    def close(self) -> None:
        """Does nothing: no data is kept between calls."""

    def blocks(self, columns: Mapping[str, str], tokens: int, tally: ReadCounts) -> Iterator[RowBlock]:
        rows: list[dict[str, Any]] = []
        numbers: list[int] = []
        number = size = 0
        for number, row in self._read(self.path, tally):
            rows.append({name: row.get(name) for name in columns.values()})
            numbers.append(number)
            behavior = row.get(columns["logp_behavior"])
            size += len(behavior) if isinstance(behavior, list) else 1
            if size >= tokens:
                yield _block(rows, columns, numbers)
                rows, numbers, size = [], [], 0
        if rows:
            yield _block(rows, columns, numbers)
        if not number:
            tally.no_rows += 1


def _block(rows: list[dict[str, Any]], columns: Mapping[str, str], numbers: list[int]) -> RowBlock:
    return build_block(
        {role: [row[name] for row in rows] for role, name in columns.items()},
        numbers,
        is_list=lambda values: any(isinstance(value, list) for value in values),
        lists=python_lists,
        scalars=list,
        fields=python_fields,
    )
