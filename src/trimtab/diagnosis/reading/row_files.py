"""Reads files of rows: one JSON object per line, one JSON array of objects, CSV, packed rows, rows of torch files.

open-instruct writes the trainer's log-probs in packed rows. A row holds several sequences, each with its prompt. With
sequence parallelism each rank writes a slice of every row to a separate file. All lists begin at the second token of
their slice, since a log-prob belongs to the next token.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.diagnosis.reading.batches import Batch, as_list, names_inside, parse_csv_cell, plain, read_cell, to_batch
from trimtab.diagnosis.reading.counts import UNEQUAL, ReadCounts
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
        """Returns the columns, without those that are null in all first rows: writers put null for unknown values."""
        every: set[str] = set()
        known: set[str] = set()
        for _, row in islice(self._read(self.path, ReadCounts()), _ROWS_FOR_NAMES):
            every |= row.keys()
            known |= {name for name, value in row.items() if value is not None} | names_inside(row)
        return frozenset(known or every)

    def batches(self, columns: Mapping[str, str], tokens: int, tally: ReadCounts) -> Iterator[Batch]:
        rows: list[dict[str, Any]] = []
        numbers: list[int] = []
        size, behavior, longest = 0, columns["logp_behavior"], limit(MAX_RESPONSE)
        for number, whole in self._read(self.path, tally):
            row = {name: plain(read_cell(whole, name)) for name in columns.values()}
            row[behavior] = cell = as_list(row[behavior])
            if isinstance(cell, list) and len(cell) == 1 and isinstance(cell[0], list):
                # NeMo-RL writes batches of one: each value is inside a list.
                row = {name: of[0] if isinstance(of, list) and len(of) == 1 else of for name, of in row.items()}
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


def read_json_lines(path: Path, tally: ReadCounts) -> Rows:
    """Yields one object per line. Other lines are dropped and counted.

    The standard parser is as fast here as arrow's parser, reads the NaN and Infinity that Python's writers emit, and
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
                yield from _take_object(number, row, tally)


def read_json_array(path: Path, tally: ReadCounts) -> Rows:
    """Yields the objects of one array, whose text is held in memory. Raises `TrimtabError` if it is damaged."""
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
        place = _find_next(text, text.index("[") + 1)
        while not text.startswith("]", place):
            number += 1
            row, place = decoder.raw_decode(text, place)
            yield from _take_object(number, row, tally)
            place = _find_next(text, place)
    except (ValueError, RecursionError) as error:
        reason = f"is not JSON or unfinished ({getattr(error, 'msg', error)})"
        raise TrimtabError(f"{path}, row {number} {reason}: fix the array") from None
    if text[place + 1 :].strip():
        raise TrimtabError(f"{path} goes on after its array: write one array, or one object per line")


def _find_next(text: str, place: int) -> int:
    """Returns the place of the next character that is neither blank nor a comma."""
    found = _NEITHER_BLANK_NOR_COMMA.search(text, place)
    return found.start() if found else len(text)


def _take_object(number: int, row: Any, tally: ReadCounts) -> Rows:
    if isinstance(row, dict):
        yield number, row
    else:
        tally.drop("not a JSON object", row=number)


def read_csv(path: Path, tally: ReadCounts) -> Rows:
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
                    yield number, {name: parse_csv_cell(text) for name, text in zip(header, cells, strict=True)}
    except csv.Error as error:
        raise TrimtabError(f"{path}, row {number + 1} is not CSV ({error}): mend its quotes") from None
    except UnicodeDecodeError:
        raise TrimtabError(f"{path} is not UTF-8 after row {number}: write it as UTF-8") from None


PACKED = re.compile(r"_trainer_logprobs_step\d+(?:_rank(?P<rank>\d+))?\.jsonl(?:\.gz)?$")
"""Names of these files."""
_MOST_SLICES = 9999
_SLICED = ("trainer_logprobs", "vllm_logprobs", "response_mask", "token_ids", "model_steps")


def find_slices(path: Path) -> list[Path]:
    """Returns the files with the slices of the same rows, in their order."""
    found = PACKED.search(path.name)
    if not found or not found["rank"]:
        return [path]
    _, row = next(read_json_lines(path, ReadCounts()), (0, {}))
    size, (start, end) = row.get("sp_size"), found.span("rank")
    count = size if isinstance(size, int) and 1 <= size <= _MOST_SLICES else 1
    first = int(found["rank"]) // count * count
    names = [f"{path.name[:start]}{rank:0{end - start}d}{path.name[end:]}" for rank in range(first, first + count)]
    return [path.with_name(name) for name in names]


def read_packed(path: Path, tally: ReadCounts) -> Rows:
    """Yields the sequences of a file, joined from all slices. A row with a missing slice is dropped and counted."""
    slices = [read_json_lines(file, tally) for file in find_slices(path)]
    for parts in zip_longest(*slices, fillvalue=(0, {})):
        line, first = max(line for line, _ in parts), parts[0][1]
        keys = [(number, row.get("step"), row.get("sample_idx")) for number, row in parts]
        is_old = "attention_mask" not in first  # such files hold the trainer's side only, and are refused later
        if any(key != keys[0] for key in keys) or (first.get("sp_size", 1) != len(slices) and not is_old):
            tally.drop("its slice in the file of another rank is missing", row=line)
        elif is_old:
            yield line, {name: value for name, value in first.items() if name != "vllm_logprobs"}
        else:
            yield from _split_sequences(line, [row for _, row in parts], tally)


def _split_sequences(line: int, slices: Sequence[Mapping[str, Any]], tally: ReadCounts) -> Rows:
    first = slices[0]
    try:
        numbers = _join(slices, "attention_mask")
        columns = {name: _join(slices, name) for name in _SLICED if name in first}
        is_usable = numbers.ndim == 2 and numbers.dtype.kind == "i"
        if not is_usable or any(column.shape != numbers.shape for column in columns.values()):
            raise ValueError
    except (KeyError, TypeError, ValueError, OverflowError):
        tally.drop(UNEQUAL, row=line)
        return
    row, step = {"step": first.get("step")}, first.get("trainer_model_step")
    for index, of_row in enumerate(numbers):
        borders = np.flatnonzero(np.diff(of_row, prepend=0, append=0))
        for start, end in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
            if of_row[start] > 0:  # 0 is padding
                # The first token of a later sequence was predicted from the sequence before it, so it is left out.
                span = slice(start + (start > 0), end)
                lists = {name: column[index, span] for name, column in columns.items()}
                yield line, row | lists | _number_version(step, lists.get("model_steps"))


def _number_version(step: Any, sampled: np.ndarray | None) -> dict[str, int]:
    """Returns the version of the trainer's weights, numbered as `model_steps`: by the step after which they were sent.

    A run's first weights have the number of its first step too. They are not newer than the trainer's weights.
    """
    if sampled is None or sampled.dtype.kind != "i" or not isinstance(step, int):
        return {}
    return {"proximal_version": max(step - 1, int(sampled.max(initial=-1)))}


def _join(slices: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
    """Returns the lists of all slices, joined (batch, time)."""
    parts = [np.array(row[name]).reshape(row[f"{name}_shape"]) for row in slices]
    return np.concatenate([np.atleast_2d(part) for part in parts], axis=1)
