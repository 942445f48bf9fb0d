"""A JSONL, JSON, CSV or parquet file as a task; see `RowOptions` for its columns."""

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

JSONL = (".jsonl", ".ndjson", ".json")


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
    """Returns numbered rows (from 1; for JSONL the line number). Raises `TrimtabError` naming the file and the row."""
    if path.is_dir():
        raise TrimtabError(f"{path} is a folder; give a file in it, or task 'hf' with dataset = {str(path)!r}")
    if path.suffix in JSONL:
        return _json(path)
    if path.suffix == ".parquet":
        return _parquet(path)
    if path.suffix == ".csv":
        return _csv(path)
    raise TrimtabError(f"{path}: unknown kind of file; give a .jsonl, .json, .csv or .parquet file")


def _csv(path: Path) -> Iterator[Row]:
    """Yields the rows below the header; a cell is text, and an empty one is missing."""
    number = 0
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            header = next(reader, [])
            if len(set(header)) < len(header):
                raise TrimtabError(f"{path} has two columns of one name: rename one")
            for number, cells in enumerate((cells for cells in reader if cells), start=1):
                if len(cells) != len(header):
                    raise TrimtabError(
                        f"{path}, row {number}: {len(cells)} cells below a header of {len(header)}; quote commas in "
                        "text"
                    )
                yield number, {name: text or None for name, text in zip(header, cells, strict=True)}
    except OSError as error:
        raise TrimtabError(f"cannot read {path}: {error.strerror}; check the path") from None
    except csv.Error as error:
        raise TrimtabError(f"{path}, row {number + 1} is not CSV ({error}): mend its quotes") from None
    except UnicodeDecodeError:
        raise TrimtabError(f"{path}: not UTF-8 text after row {number}; save it as UTF-8") from None


def _json(path: Path) -> Iterator[Row]:
    """Yields the rows of JSONL; a .json file may also be one array of objects over any number of lines."""
    number = 0
    try:
        with regular_file(path).open(encoding="utf-8-sig") as lines:
            if path.suffix == ".json" and lines.read(1024).lstrip().startswith("["):
                lines.seek(0)
                yield from _array(lines.read(), path)
                return
            lines.seek(0)
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    location = f"{path}, row {number}"
                    yield number, _object(_parse(line, location, "write one object a line"), location)
    except OSError as error:
        raise TrimtabError(f"cannot read {path}: {error.strerror}; check the path") from None
    except UnicodeDecodeError:
        raise TrimtabError(f"{path}: not UTF-8 text after row {number}; save it as UTF-8") from None


def _array(text: str, path: Path) -> Iterator[Row]:
    for number, value in enumerate(_parse(text, str(path), "write one array of objects"), start=1):
        yield number, _object(value, f"{path}, row {number}")


def _parse(text: str, location: str, advice: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = f"{error.msg} at character {error.pos + 1}" if error.lineno == 1 else str(error)
        raise TrimtabError(f"{location}: broken JSON ({where}); {advice}") from None
    except (ValueError, RecursionError):  # a number of thousands of digits, or brackets inside brackets
        raise TrimtabError(
            f"{location}: JSON that cannot be read, a number or nesting is too large; {advice}"
        ) from None


def _object(value: Any, location: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TrimtabError(
            f"{location}: a JSON {type(value).__name__}, not an object; write one {{...}} with named columns a row"
        )
    return value


def _parquet(path: Path) -> Iterator[Row]:
    number = 0
    try:
        with open_parquet(path) as file:
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
