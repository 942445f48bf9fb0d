"""A JSONL, JSON, CSV or parquet file as a task; see `RowOptions` for its columns.

Not read with `datasets.load_dataset`: it gives a column one type, so that a CSV cell "007" becomes 7, the text
"2020-01-01" a date and a forgotten column None, and its row numbers leave out empty lines.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pydantic import Field

from trimtab.errors import TrimtabError
from trimtab.files import open_parquet, regular_file
from trimtab.tasks.rows import Row, RowOptions, build_task, read_problems
from trimtab.tasks.task import BuiltTask


class Options(RowOptions):
    path: Path = Field(description="JSONL (.jsonl, .ndjson, .json), a JSON array (.json), .csv or .parquet file")
    test_path: Path | None = Field(None, description="another file for the test split; then holdout is not used")


def build(options: Options) -> BuiltTask:
    problems = read_problems(read_rows(options.path), options, str(options.path), options.path.stem)
    if options.test_path is None:
        return build_task(options.path.stem, options, problems, None, str(options.path))
    path = options.test_path
    held_out = read_problems(read_rows(path), options.for_test_split, str(path), path.stem)
    return build_task(path.stem, options, problems, held_out, str(options.path))


def read_rows(path: Path) -> Iterator[Row]:
    """Yields numbered rows (from 1; for JSONL the line number). Raises `TrimtabError` naming the file and the row."""
    if path.is_dir():
        raise TrimtabError(f"{path} is a folder; give a file in it, or task 'hf' with dataset = {str(path)!r}")
    if path.suffix not in _READERS:
        raise TrimtabError(f"{path}: unknown kind of file; give a .jsonl, .json, .csv or .parquet file")
    number = 0
    try:
        for number, row in enumerate(_READERS[path.suffix](path), start=1):
            if row is None:
                continue
            if not isinstance(row, dict):
                raise TrimtabError(
                    f"{path}, row {number}: a JSON {type(row).__name__}, not an object; write one {{...}} with named "
                    "columns a row"
                )
            yield number, row
    except TrimtabError:
        raise
    except OSError as error:  # pyarrow raises it both for the system's refusals and for damaged pages
        raise TrimtabError(f"cannot read {path}: {error.strerror or error}; check the file") from None
    except UnicodeDecodeError:
        raise TrimtabError(f"{path}: not UTF-8 text after row {number}; save it as UTF-8") from None
    except (pa.ArrowException, csv.Error, ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0]
        raise TrimtabError(f"{path} cannot be read from row {number + 1} on ({reason}): mend or remove it") from None


def _csv(path: Path) -> Iterator[Any]:
    """Yields the rows below the header; a cell is text, and an empty one is missing."""
    with regular_file(path).open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        header = next(reader, [])
        if len(set(header)) < len(header):
            raise TrimtabError(f"{path} has two columns of one name: rename one")
        for cells in filter(None, reader):
            if len(cells) != len(header):
                raise csv.Error(f"{len(cells)} cells below a header of {len(header)}; quote commas in text")
            yield {name: text or None for name, text in zip(header, cells, strict=True)}


def _json(path: Path) -> Iterator[Any]:
    """Yields the lines of JSONL, None for an empty one; a .json file may also be one array over any number of lines."""
    with regular_file(path).open(encoding="utf-8-sig") as lines:
        is_array = path.suffix == ".json" and lines.read(1024).lstrip().startswith("[")
        lines.seek(0)
        if is_array:
            yield from json.load(lines)
            return
        for line in lines:
            yield json.loads(line) if line.strip() else None


def _parquet(path: Path) -> Iterator[Any]:
    with open_parquet(path) as file:
        for batch in file.iter_batches():
            yield from batch.to_pylist()


_READERS = {".jsonl": _json, ".ndjson": _json, ".json": _json, ".csv": _csv, ".parquet": _parquet}
