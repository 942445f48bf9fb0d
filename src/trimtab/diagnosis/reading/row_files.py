"""Reads files of rows: one JSON object per line, one JSON array of objects, CSV, and the rows of torch files."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.diagnosis.reading.batches import Batch, to_batch
from trimtab.diagnosis.reading.cells import as_list, csv_cell, plain
from trimtab.diagnosis.reading.read_counts import ReadCounts
from trimtab.errors import TrimtabError
from trimtab.files import MAX_ARRAY_BYTES, MAX_RESPONSE, MAX_ROW_BYTES, RAISE_LIMITS, limit, opened, too_long

Rows = Iterator[tuple[int, dict[str, Any]]]
"""Numbers, from 1, and contents of the usable rows; the others are counted."""
_NEITHER_BLANK_NOR_COMMA = re.compile(r"[^\s,]")
_ROWS_FOR_NAMES = 16  # rows whose keys define the columns


class RowFile:
    """A file of rows, which the function `read` yields."""

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

    def batches(self, columns: Mapping[str, str], tokens: int, tally: ReadCounts) -> Iterator[Batch]:
        rows: list[dict[str, Any]] = []
        numbers: list[int] = []
        size, behavior, longest = 0, columns["logp_behavior"], limit(MAX_RESPONSE)
        for number, whole in self._read(self.path, tally):
            row = {name: plain(whole.get(name)) for name in columns.values()}
            row[behavior] = cell = as_list(row[behavior])
            if isinstance(cell, list) and len(cell) == 1 and isinstance(cell[0], list):
                # A batch of one, as NeMo-RL writes it: a list is around each of its values.
                row = {
                    name: cell[0] if isinstance(cell, list) and len(cell) == 1 else cell for name, cell in row.items()
                }
            for name, cell in row.items():
                count = len(cell) if isinstance(cell, list) else cell.size if isinstance(cell, np.ndarray) else 0
                if count > longest:
                    raise too_long(self.path, name, count, 1, longest)
            rows.append(row)
            numbers.append(number)
            size += len(row[behavior]) if isinstance(row[behavior], list | np.ndarray) else 1
            if size >= tokens:
                yield to_batch(_by_role(rows, columns), numbers)
                rows, numbers, size = [], [], 0
        if rows:
            yield to_batch(_by_role(rows, columns), numbers)


def _by_role(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> dict[str, list[Any]]:
    return {role: [row[name] for row in rows] for role, name in columns.items()}


def json_lines(path: Path, tally: ReadCounts) -> Rows:
    """Yields one object per line. Other lines are dropped and counted.

    The standard parser is as fast here as that of arrow, reads the NaN and Infinity that Python's writers emit, and
    confines an error to its line.
    """
    number, longest = 0, limit(MAX_ROW_BYTES)
    with opened(path) as file:
        while line := file.readline(longest + 1):
            number += 1
            if len(line) > longest:
                raise TrimtabError(
                    f"{path} has a line of over {longest >> 20} MB: it is not JSON lines, or {RAISE_LIMITS}"
                )
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except UnicodeDecodeError:
                tally.drop("not UTF-8", row=number)
            except (ValueError, RecursionError):
                tally.drop("not JSON" if line.endswith(b"\n") else "unfinished last line", row=number)
            else:
                yield from _object(number, row, tally)


def json_array(path: Path, tally: ReadCounts) -> Rows:
    """Yields the objects of one array, of which the text is held in memory. Raises `TrimtabError` if it is damaged."""
    try:
        with opened(path) as file:
            reader = io.TextIOWrapper(file, encoding="utf-8-sig")
            most = limit(MAX_ARRAY_BYTES) >> 20
            text = "".join(islice(iter(lambda: reader.read(1 << 20), ""), most))
            if reader.read(1):
                raise TrimtabError(
                    f"{path} is an array of over {most} MB: write one object per line, or {RAISE_LIMITS}"
                )
    except UnicodeDecodeError:
        raise TrimtabError(f"{path} is not UTF-8: write it as UTF-8") from None
    decoder, number = json.JSONDecoder(), 0
    try:
        place = _next(text, text.index("[") + 1)
        while not text.startswith("]", place):
            number += 1
            row, place = decoder.raw_decode(text, place)
            yield from _object(number, row, tally)
            place = _next(text, place)
    except (ValueError, RecursionError) as error:
        reason = f"is not JSON or unfinished ({getattr(error, 'msg', error)})"
        raise TrimtabError(f"{path}, row {number} {reason}: fix the array") from None
    if text[place + 1 :].strip():
        raise TrimtabError(f"{path} goes on after its array: write one array, or one object per line")


def _next(text: str, place: int) -> int:
    """Returns the place of the next character that is neither blank nor a comma."""
    found = _NEITHER_BLANK_NOR_COMMA.search(text, place)
    return found.start() if found else len(text)


def _object(number: int, row: Any, tally: ReadCounts) -> Rows:
    if isinstance(row, dict):
        yield number, row
    else:
        tally.drop("not a JSON object", row=number)


def csv_rows(path: Path, tally: ReadCounts) -> Rows:
    """Yields every row as a dictionary; rows whose length differs from the header's are dropped and counted."""
    csv.field_size_limit(limit(MAX_ROW_BYTES))
    number = 0
    try:
        with opened(path) as file:
            reader = csv.reader(io.TextIOWrapper(file, encoding="utf-8-sig", newline=""), strict=True)
            header = next(reader, [])
            if len(set(header)) < len(header):
                raise TrimtabError(f"{path} has two columns of one name: rename one")
            for number, cells in enumerate((cells for cells in reader if cells), start=1):
                if len(cells) != len(header):
                    tally.drop("not as many cells as the header", row=number)
                else:
                    yield number, {name: csv_cell(text) for name, text in zip(header, cells, strict=True)}
    except csv.Error as error:
        raise TrimtabError(f"{path}, row {number + 1} is not CSV ({error}): mend its quotes") from None
    except UnicodeDecodeError:
        raise TrimtabError(f"{path} is not UTF-8 after row {number}: write it as UTF-8") from None
