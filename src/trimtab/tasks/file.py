"""A JSONL or parquet file as a task; see `RowOptions` for how columns are named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field

from trimtab.errors import TrimtabError
from trimtab.tasks.base import BuiltTask
from trimtab.tasks.rows import Row, RowOptions, build_task, read_problems

JSONL = (".jsonl", ".ndjson", ".json")


class Options(RowOptions):
    path: Path = Field(description="JSONL (.jsonl, .ndjson, .json) or .parquet file")
    test_path: Path | None = Field(None, description="a file of its own for the test split; then holdout is not used")


def build(options: Options) -> BuiltTask:
    problems = read_problems(read_rows(options.path), options, str(options.path), options.path.stem)
    held_out = None
    if options.test_path is not None:
        held_out = read_problems(read_rows(options.test_path), options, str(options.test_path), options.test_path.stem)
    return build_task(options.path.stem, options, problems, held_out, str(options.path))


def read_rows(path: Path) -> Iterator[Row]:
    """Numbered rows (from 1; for JSONL the line number). Raises `TrimtabError` naming the file and the row."""
    if path.suffix in JSONL:
        return _jsonl(path)
    if path.suffix == ".parquet":
        return _parquet(path)
    raise TrimtabError(f"{path}: unknown kind of file; give a .jsonl or .parquet file")


def _jsonl(path: Path) -> Iterator[Row]:
    number = 0
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, _row(line, f"{path}, row {number}")
    except OSError as error:
        raise TrimtabError(f"cannot read {path}: {error.strerror}; check the path") from None
    except UnicodeDecodeError:
        raise TrimtabError(f"{path}: not UTF-8 text after row {number}; save it as UTF-8") from None


def _row(line: str, place: str) -> dict:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise TrimtabError(
            f"{place}: broken JSON ({error.msg} at character {error.pos + 1}); write one object a line"
        ) from None
    if not isinstance(row, dict):
        raise TrimtabError(
            f"{place}: a JSON {type(row).__name__}, not an object; write one {{...}} with named columns a line"
        )
    return row


def _parquet(path: Path) -> Iterator[Row]:
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except OSError as error:  # pyarrow raises it both for the system's refusals and for damaged pages
        raise TrimtabError(f"cannot read {path}: {error.strerror or error}; check the file") from None
    except pa.ArrowException as error:
        raise TrimtabError(
            f"{path}: not a readable parquet file after row {number} ({str(error).splitlines()[0]})"
        ) from None
