"""Data sets as tasks: a JSONL, JSON, CSV or parquet file, or a Hugging Face dataset; see `RowOptions` for columns.

A file is not read with `datasets.load_dataset`: it gives a column one type, so that a CSV cell "007" becomes 7, the
text "2020-01-01" a date and a forgotten column None, and its row numbers leave out empty lines.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pydantic import Field

from trimtab.errors import TrimtabError, first_line
from trimtab.files import open_parquet, regular_file
from trimtab.trainer.tasks.rows import Row, RowOptions, build_task, read_problems
from trimtab.trainer.tasks.task import BuiltTask
from trimtab.types import Problem


class File(RowOptions):
    path: Path = Field(description="JSONL (.jsonl, .ndjson, .json), a JSON array (.json), .csv or .parquet file")
    test_path: Path | None = Field(None, description="another file for the test split; then holdout is not used")

    def build(self) -> BuiltTask:
        path, other = self.path, self.test_path
        problems = read_problems(read_rows(path), self, str(path), path.stem)
        if other is None:
            return build_task(path.stem, self, problems, None, str(path))
        held_out = read_problems(read_rows(other), self, str(other), other.stem)
        return build_task(other.stem, self, problems, held_out, str(path))


class HuggingFace(RowOptions):
    dataset: str = Field(description="hub name, e.g. openai/gsm8k, or a local folder")
    config: str | None = Field(None, description="its configuration, e.g. main")
    split: str = Field("train", description="the split that is trained on")
    test_split: str | None = Field(None, description="another split for testing; then holdout is not used")
    files: str | None = Field(
        None, description="one file of the data set, or a pattern, e.g. train/math__*.parquet; they are the split train"
    )

    def build(self) -> BuiltTask:
        held_out = None if self.test_split is None else self._problems(self.test_split)
        problems = self._problems(self.split)
        name = self.dataset.rstrip("/").rpartition("/")[2]
        return build_task(name, self, problems, held_out, f"dataset {self.dataset!r}")

    def _problems(self, split: str) -> list[Problem]:
        import datasets

        where = f"dataset {self.dataset!r}, split {split!r}"
        try:
            rows: Any = datasets.load_dataset(self.dataset, self.config, split=split, data_files=self.files)
        except Exception as error:  # network, missing names, damaged files: each library layer has its own classes
            raise TrimtabError(
                f"{where}: cannot load it: {first_line(error)}; check the names, or the network and HF_HUB_OFFLINE"
            ) from None
        return read_problems(enumerate(rows, start=1), self, where, split)


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
        raise TrimtabError(
            f"{path} cannot be read from row {number + 1} on ({first_line(error)}): mend or remove it"
        ) from None


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
