"""Rows of a file as arrow arrays by role, in whatever format they were written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trimtab.diagnosis.reading.cells import array_of, as_list, shown
from trimtab.diagnosis.reading.layouts import EITHER_SHAPE, TOKEN_ROLES
from trimtab.diagnosis.reading.read_counts import NO_LIST, ONE_NUMBER

SAMPLING = ("temperature", "top_p", "top_k", "logprobs")
_KEYS = ("group", "prompt")
_LISTS = (*TOKEN_ROLES, *EITHER_SHAPE, "prompt_length")
_ALWAYS_LISTS = set(TOKEN_ROLES) - set(EITHER_SHAPE)
Column = Any
"""A column of a file: an arrow array, or one Python value or numpy array per row."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of a file: `table` has a column for each role, of lists of numbers (null where there is none) or of numbers.

    Groups and prompts are hashes, null where unknown; other unknown numbers are NaN.
    numbers: row numbers in the file, from 1. faults: rows without a list by reason, each with what it holds instead.
    """

    table: pa.RecordBatch
    numbers: Sequence[int]
    faults: Mapping[str, Mapping[int, str]]

    @property
    def lists(self) -> dict[str, pa.Array]:
        """The columns of lists."""
        return {field.name: self.table.column(field.name) for field in self.table.schema if _is_list(field.type)}

    def has(self, role: str) -> bool:
        """Returns whether `role` has one number for each row."""
        return role in self.table.schema.names and not _is_list(self.table.schema.field(role).type)

    def number(self, role: str) -> np.ndarray:
        """Returns a number for each row (rows,), NaN where it is unknown."""
        return self.table.column(role).to_numpy(zero_copy_only=False)

    def keys(self, role: str, rows: np.ndarray) -> list[int | None]:
        """Returns the hashes of a group or prompt where `rows` (rows,) is True."""
        return self.table.column(role).filter(pa.array(rows)).to_pylist()


def to_batch(columns: Mapping[str, Column], numbers: Sequence[int]) -> Batch:
    """Returns a batch from the columns of a file by role."""
    values: dict[str, pa.Array] = {}
    faults: dict[str, Mapping[int, str]] = {}
    for role, column in columns.items():
        cells = column if role in _LISTS and _is_number_list(column) else _cells(role, column)
        if role == "sampling":
            fields = [cell if isinstance(cell, dict) else {} for cell in cells]
            values |= {name: _scalars(name, [row.get(name) for row in fields]) for name in SAMPLING}
        elif role in _ALWAYS_LISTS or (role in _LISTS and _has_lists(cells)):
            values[role] = cells if isinstance(cells, pa.Array) else _lists(cells)
            if role == "prompt_length":  # the prompt's tokens
                values[role] = pc.cast(pc.call_function("list_value_length", [values[role]]), pa.float64())
            else:
                faults |= _faults(role, values[role], cells)
        else:
            values[role] = _scalars(role, cells)
    return Batch(pa.RecordBatch.from_pydict(values), numbers, faults)


def flat(lists: pa.Array) -> np.ndarray:
    """Returns the numbers of all lists, one after the other, NaN for null."""
    values = lists.flatten()
    if pa.types.is_boolean(values.type):
        values = values.cast(pa.uint8())
    return values.to_numpy(zero_copy_only=False)


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _is_number_list(column: Column) -> bool:
    if not isinstance(column, pa.Array) or not _is_list(column.type):
        return False
    kind = column.type.value_type
    return pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind)


def _cells(role: str, column: Column) -> Sequence[Any]:
    """Returns what each row holds, as a list of numbers where it can be read as one."""
    cells = column.to_pylist() if isinstance(column, pa.Array) else column
    return [as_list(cell) for cell in cells] if role in _LISTS else cells


def _has_lists(column: Column) -> bool:
    return isinstance(column, pa.Array) or any(isinstance(cell, list | np.ndarray) for cell in column)


def _lists(cells: Sequence[Any]) -> pa.ListArray:
    arrays = [array_of(cell) for cell in cells]
    present = [array for array in arrays if array is not None]
    ends = np.cumsum([0, *(0 if array is None else len(array) for array in arrays)])
    values = pa.array(np.concatenate(present) if present else np.empty(0))
    missing = pa.array([array is None for array in arrays])
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), values, mask=missing)


def _faults(role: str, lists: pa.Array, column: Column) -> dict[str, dict[int, str]]:
    """Returns the rows without a list, by reason."""
    absent, wrong, single = f"no {role}", f"{role} {NO_LIST}", f"{role} is {ONE_NUMBER}"
    found: dict[str, dict[int, str]] = {absent: {}, wrong: {}, single: {}}
    for row in np.flatnonzero(lists.is_null().to_numpy(zero_copy_only=False)).tolist():
        cell = None if isinstance(column, pa.Array) else column[row]
        if cell is None or isinstance(cell, int | float | Decimal):
            found[absent if cell is None else single][row] = ""
        else:
            found[wrong][row] = shown(cell)
    return {reason: rows for reason, rows in found.items() if rows}


def _scalars(role: str, cells: Sequence[Any]) -> pa.Array:
    if role in _KEYS:
        return pa.array([_key(cell) for cell in cells], pa.int64())
    return pa.array([cell == "raw" if role == "logprobs" else _number(cell) for cell in cells], pa.float64())


def _key(cell: Any) -> int | None:
    """Returns a hash, since prompts are long and only their equality matters; None for an unknown one."""
    if isinstance(cell, np.ndarray):
        return hash(cell.tobytes())
    return None if cell is None or cell != cell else hash(str(cell))


def _number(cell: Any) -> float:
    try:
        return float(cell) if isinstance(cell, int | float | Decimal) else float("nan")
    except OverflowError:  # an integer of more than 308 digits
        return float("nan")
