"""Reads CSV: one response per row, a list as `[-0.1, -0.2]` or `[-0.1 -0.2]` in one cell."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

from trimtab.diagnosis.reading.cells import WORDS, number, number_list
from trimtab.diagnosis.reading.read_counts import ReadCounts
from trimtab.diagnosis.reading.row_blocks import Rows
from trimtab.diagnosis.reading.text_files import LONGEST, opened
from trimtab.errors import TrimtabError


def csv_rows(path: Path, tally: ReadCounts) -> Rows:
    """Yields every row as a dictionary; rows whose length differs from the header's are dropped and counted."""
    csv.field_size_limit(LONGEST)
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
                    yield number, {name: cell(text) for name, text in zip(header, cells, strict=True)}
    except csv.Error as error:
        raise TrimtabError(f"{path}, row {number + 1} is not CSV ({error}): mend its quotes") from None
    except UnicodeDecodeError:
        raise TrimtabError(f"{path} is not UTF-8 after row {number}: write it as UTF-8") from None


def cell(text: str) -> Any:
    """Parses a cell: a list, an object, a number, None for an empty one, or text."""
    text = text.strip()
    if (numbers := number_list(text)) is not None:
        return numbers
    if text.startswith("{"):
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text
    if not text:
        return None
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    try:
        return number(text)
    except ValueError:
        return text
