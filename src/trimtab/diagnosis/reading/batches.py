"""Converts the rows of a file to arrow arrays and numbers by role, from cells in many notations."""

from __future__ import annotations

import ast
import json
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trimtab.diagnosis.reading.counts import NO_LIST, ONE_NUMBER
from trimtab.diagnosis.reading.layouts import EITHER_SHAPE, SAMPLING, TOKEN_ROLES

_WORDS = {"true": True, "false": False, "none": None, "null": None}
_ARRAY = re.compile(r"(?:np\.)?(?:array|tensor)\((\[.*\])(?:,\s*dtype=[\w.]+)?\)", re.DOTALL)
_SCALAR = re.compile(r"np\.float\d+\(([^()]*)\)")
_IN_A_RESPONSE = ("choices", "logprobs", "meta_info", "content", "refusal", "token_logprobs", "output_token_logprobs")
"""Keys of OpenAI's and SGLang's responses that lead to the log-probs, the outer ones first."""
_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = 60
_SHOWN.maxlist = _SHOWN.maxdict = 3


def as_list(cell: Any) -> Any:
    """Returns the list in a cell, as numbers if possible; a cell without a list is returned unchanged.

    Text may be a list as written by JSON, Python or numpy. Items may be records: `{"token", "logprob"}` of OpenAI's
    servers, `[logprob, id, text]` of SGLang, or `{id: {"logprob"}}` of vLLM; a list of records may be inside a server's
    response. The lists of a conversation (a list of messages and choices) are joined.
    """
    value = _find_records(_parse(cell.strip()) if isinstance(cell, str) else cell)
    if isinstance(value, list) and isinstance(next((item for item in value if item is not None), None), dict | list):
        value = [_logprob(item) for item in value]
    return value if isinstance(value, list) else cell


def _find_records(value: Any) -> Any:
    """Returns the list in a server's response, or the lists of a conversation joined; other values unchanged."""
    value = _find_list(value)
    if not isinstance(value, list) or not isinstance(next(iter(value), None), dict):
        return value
    scored = [item for item in value if isinstance(item, dict) and item.get("logprobs")]
    if not scored or any(item.get("index") for item in scored):  # several choices do not tell which was trained on
        return value
    parts = [_find_list(item["logprobs"]) for item in scored]
    return [record for part in parts for record in part] if all(isinstance(part, list) for part in parts) else value


def _find_list(value: Any) -> Any:
    while isinstance(value, dict):
        inner = next((value[name] for name in _IN_A_RESPONSE if isinstance(value.get(name), list | dict)), None)
        if inner is None:
            break
        value = inner
    return value


def parse_numbers(text: str) -> list[Any] | None:
    """Returns numbers, booleans and nulls as written by JSON, Python or numpy; None for other text."""
    if match := _ARRAY.fullmatch(text):
        text = match[1]
    if not (text.startswith("[") and text.endswith("]")):
        return None
    inner = _SCALAR.sub(r"\1", text[1:-1]).strip()
    parts = inner.split("," if "," in inner else None)
    try:
        return [_WORDS[word] if (word := part.strip().lower()) in _WORDS else _parse_number(word) for part in parts]
    except ValueError:
        return None


def _parse_number(text: str) -> int | float:
    """Parses a number; token ids stay integers."""
    return int(text) if text.lstrip("-").isdecimal() and len(text) < 19 else float(text)


def parse_csv_cell(text: str) -> Any:
    """Parses a cell: a list of numbers, an object, a number, None if it is empty, or text."""
    text = text.strip()
    if (numbers := parse_numbers(text)) is not None:
        return numbers
    if (word := text.lower()) in _WORDS:
        return _WORDS[word]
    try:
        return json.loads(text) if text.startswith("{") else _parse_number(text) if text else None
    except (ValueError, RecursionError):
        return text


def read_cell(row: Mapping[str, Any], name: str) -> Any:
    """Returns a cell. `column.field` is a field of an object, or the list of this field over a list of objects."""
    column, _, field = name.partition(".")
    value = None if name in row else row.get(column)
    if isinstance(value, list):
        return [item.get(field) if isinstance(item, dict) else None for item in value]
    return value.get(field) if isinstance(value, dict) else row.get(name)


def names_inside(row: Mapping[str, Any]) -> set[str]:
    """Returns the names `column.field` of the objects in a row."""
    firsts = ((name, next(iter(cell), None) if isinstance(cell, list) else cell) for name, cell in row.items())
    return {f"{name}.{field}" for name, first in firsts if isinstance(first, dict) for field in first}


def plain(value: Any) -> Any:
    """Converts a tensor to an array, and a tensor or array without dimensions to a number."""
    if hasattr(value, "detach"):
        tensor = value.detach()
        value = (tensor.float() if tensor.is_floating_point() else tensor).numpy()
    return value.item() if isinstance(value, np.ndarray) and value.ndim == 0 else value


def to_array(cell: Any) -> np.ndarray | None:
    """Returns the numbers of a list or array: text is parsed, None becomes NaN. Returns None for any other cell.

    A list with text that is not a finite number, such as "NaN", also gives None, so that it is reported.
    """
    if not isinstance(cell, list | np.ndarray):
        return None
    try:
        values = np.asarray(cell)
        if values.dtype.kind == "U":
            values = values.astype(np.float64)
            if not np.isfinite(values).all():
                return None
        elif values.dtype.kind == "O" and all(
            item is None or isinstance(item, int | float | Decimal) for item in values.flat
        ):
            values = values.astype(np.float64)
    except (ValueError, OverflowError):  # lists of different lengths within, words; an integer of over 308 digits
        return None
    return values if values.ndim == 1 and values.dtype.kind in "fiub" else None


def shown(cell: Any) -> str:
    """Returns a cell in short, for a message; for numbers written as text, the first item that is not a number."""
    if isinstance(cell, list) and any(isinstance(item, str) for item in cell):
        wrong = (place for place, item in enumerate(cell) if to_array([item]) is None)
        if (place := next(wrong, None)) is not None:
            return f"{_SHOWN.repr(cell[place])} at place {place + 1} of {len(cell)}"
    return _SHOWN.repr(cell)


def _parse(text: str) -> Any:
    if (numbers := parse_numbers(text)) is not None:
        return numbers
    if not text.startswith(("[", "{")):
        return text
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):  # MemoryError: nested too deeply for the parser
            continue
    return text


def _logprob(item: Any) -> Any:
    """Returns the log-prob of one record, or the item if it is not a record."""
    if isinstance(item, dict):
        if "logprob" in item:
            return item["logprob"]
        inner = next(iter(item.values())) if len(item) == 1 else None  # more entries do not tell which was sampled
        return inner["logprob"] if isinstance(inner, dict) and "logprob" in inner else item
    match item:
        case [logprob, int(), str() | None]:
            return logprob
    return item


_LISTS = (*TOKEN_ROLES, *EITHER_SHAPE, "prompt_length")
_ALWAYS_LISTS = set(TOKEN_ROLES) - set(EITHER_SHAPE)
Column = Any
"""A column of a file: an arrow array, or one Python value or numpy array per row."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of a file, by role."""

    numbers: Sequence[int]  # row numbers in the file, from 1
    lists: Mapping[str, pa.Array]  # lists of numbers; null if a row has none
    scalars: Mapping[str, np.ndarray]  # float64 (rows,); NaN if unknown
    keys: Mapping[str, np.ndarray]  # object (rows,): hashes of groups and prompts, ids of prompts; None if unknown
    faults: Mapping[str, Mapping[int, str]]  # by reason: rows without a list, each with what it holds instead

    def has_value(self, role: str) -> bool:
        """Whether some row has a finite number or a key of the role."""
        if role in self.keys:
            return any(key is not None for key in self.keys[role])
        values = flat(self.lists[role]) if role in self.lists else self.scalars[role]
        return bool(np.isfinite(values.astype(np.float64)).any())


def to_batch(columns: Mapping[str, Column], numbers: Sequence[int]) -> Batch:
    """Returns a batch from the columns of a file by role."""
    lists: dict[str, pa.Array] = {}
    scalars: dict[str, np.ndarray] = {}
    keys: dict[str, np.ndarray] = {}
    faults: dict[str, Mapping[int, str]] = {}
    for role, column in columns.items():
        cells = column if role in _LISTS and _is_number_list(column) else _to_cells(role, column)
        if role in ("group", "prompt"):
            keys[role] = np.array([_hash_key(cell) for cell in cells], dtype=object)
        elif role == "prompt_ids":
            keys[role] = np.empty(len(cells), dtype=object)
            keys[role][:] = [_to_ids(as_list(cell)) for cell in cells]
        elif role == "sampling":
            fields = [cell if isinstance(cell, dict) else {} for cell in cells]
            scalars |= {name: _to_scalars(name, [row.get(name) for row in fields]) for name in SAMPLING}
        elif role in _ALWAYS_LISTS or (
            role in _LISTS
            and (isinstance(cells, pa.Array) or any(isinstance(cell, list | np.ndarray) for cell in cells))
        ):
            array = cells if isinstance(cells, pa.Array) else _to_lists(cells)
            if role == "prompt_length":  # the prompt's tokens
                scalars[role] = list_lengths(array).to_numpy(zero_copy_only=False).astype(np.float64)
            else:
                lists[role] = array
                faults |= _find_faults(role, array, cells)
        else:
            scalars[role] = _to_scalars(role, cells)
    return Batch(numbers, lists, scalars, keys, faults)


def list_lengths(lists: pa.Array) -> pa.Array:
    return pc.call_function("list_value_length", [lists])


def flat(lists: pa.Array) -> np.ndarray:
    """Returns the numbers of all lists, one after the other, NaN for null."""
    values = lists.flatten()
    if pa.types.is_boolean(values.type):
        values = values.cast(pa.uint8())
    return values.to_numpy(zero_copy_only=False)


def is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _is_number_list(column: Column) -> bool:
    if not isinstance(column, pa.Array) or not is_list(column.type):
        return False
    kind = column.type.value_type
    return pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind)


def _to_cells(role: str, column: Column) -> Sequence[Any]:
    """Returns the cell of each row, as a list of numbers if possible."""
    cells = column.to_pylist() if isinstance(column, pa.Array) else column
    return [as_list(cell) for cell in cells] if role in _LISTS else cells


def _to_lists(cells: Sequence[Any]) -> pa.ListArray:
    arrays = [to_array(cell) for cell in cells]
    present = [array for array in arrays if array is not None]
    ends = np.cumsum([0, *(0 if array is None else len(array) for array in arrays)])
    values = pa.array(np.concatenate(present) if present else np.empty(0))
    missing = pa.array([array is None for array in arrays])
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), values, mask=missing)


def _find_faults(role: str, lists: pa.Array, column: Column) -> dict[str, dict[int, str]]:
    absent, wrong, single = f"no {role}", f"{role} {NO_LIST}", f"{role} is {ONE_NUMBER}"
    found: dict[str, dict[int, str]] = {absent: {}, wrong: {}, single: {}}
    for row in np.flatnonzero(lists.is_null().to_numpy(zero_copy_only=False)).tolist():
        cell = None if isinstance(column, pa.Array) else column[row]
        if cell is None or isinstance(cell, int | float | Decimal):
            found[absent if cell is None else single][row] = ""
        else:
            found[wrong][row] = shown(cell)
    return {reason: rows for reason, rows in found.items() if rows}


def _to_scalars(role: str, cells: Sequence[Any]) -> np.ndarray:
    is_raw = role == "logprobs"
    return np.array([str(cell) == "raw" if is_raw else _to_number(cell) for cell in cells], dtype=np.float64)


def _hash_key(cell: Any) -> int | None:
    """Returns a hash, since prompts are long and only their equality matters; None if unknown."""
    if isinstance(cell, np.ndarray):
        return hash(cell.tobytes())
    return None if cell is None or cell != cell else hash(str(cell))


def _to_ids(cell: Any) -> np.ndarray | None:
    """Returns the token ids (tokens,) of a list, or None for anything else."""
    values = to_array(cell)
    return None if values is None or not np.isfinite(values).all() else values.astype(np.int64)


def _to_number(cell: Any) -> float:
    try:
        return float(cell) if isinstance(cell, int | float | Decimal) else float("nan")
    except OverflowError:  # an integer of more than 308 digits
        return float("nan")
