"""Rows of a file as arrow arrays and numbers by role."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trimtab.diagnosis.reading.cells import array_of, as_list, shown
from trimtab.diagnosis.reading.counts import NO_LIST, ONE_NUMBER
from trimtab.diagnosis.reading.layouts import EITHER_SHAPE, SAMPLING, TOKEN_ROLES

_LISTS = (*TOKEN_ROLES, *EITHER_SHAPE, "prompt_length")
_ALWAYS_LISTS = set(TOKEN_ROLES) - set(EITHER_SHAPE)
Column = Any
"""A column of a file: an arrow array, or one Python value or numpy array per row."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of a file: lists of numbers, null where there is none, and float64 (rows,), NaN where unknown, by role.

    numbers: row numbers in the file, from 1. keys: hashes of groups and prompts, and ids of prompts, object (rows,),
    None where unknown.
    faults: rows without a list by reason, each with what it holds instead.
    """

    numbers: Sequence[int]
    lists: Mapping[str, pa.Array]
    scalars: Mapping[str, np.ndarray]
    keys: Mapping[str, np.ndarray]
    faults: Mapping[str, Mapping[int, str]]

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
        cells = column if role in _LISTS and _is_number_list(column) else _cells(role, column)
        if role in ("group", "prompt"):
            keys[role] = np.array([_key(cell) for cell in cells], dtype=object)
        elif role == "prompt_ids":
            keys[role] = np.empty(len(cells), dtype=object)
            keys[role][:] = [_ids(as_list(cell)) for cell in cells]
        elif role == "sampling":
            fields = [cell if isinstance(cell, dict) else {} for cell in cells]
            scalars |= {name: _scalars(name, [row.get(name) for row in fields]) for name in SAMPLING}
        elif role in _ALWAYS_LISTS or (
            role in _LISTS
            and (isinstance(cells, pa.Array) or any(isinstance(cell, list | np.ndarray) for cell in cells))
        ):
            array = cells if isinstance(cells, pa.Array) else _lists(cells)
            if role == "prompt_length":  # the prompt's tokens
                scalars[role] = list_lengths(array).to_numpy(zero_copy_only=False).astype(np.float64)
            else:
                lists[role] = array
                faults |= _faults(role, array, cells)
        else:
            scalars[role] = _scalars(role, cells)
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


def _cells(role: str, column: Column) -> Sequence[Any]:
    """Returns what each row holds, as a list of numbers where it can be read as one."""
    cells = column.to_pylist() if isinstance(column, pa.Array) else column
    return [as_list(cell) for cell in cells] if role in _LISTS else cells


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


def _scalars(role: str, cells: Sequence[Any]) -> np.ndarray:
    is_raw = role == "logprobs"
    return np.array([str(cell) == "raw" if is_raw else _number(cell) for cell in cells], dtype=np.float64)


def _key(cell: Any) -> int | None:
    """Returns a hash, since prompts are long and only their equality matters; None for an unknown one."""
    if isinstance(cell, np.ndarray):
        return hash(cell.tobytes())
    return None if cell is None or cell != cell else hash(str(cell))


def _ids(cell: Any) -> np.ndarray | None:
    """Returns the token ids (tokens,) of a list, or None for anything else."""
    values = array_of(cell)
    return None if values is None or not np.isfinite(values).all() else values.astype(np.int64)


def _number(cell: Any) -> float:
    try:
        return float(cell) if isinstance(cell, int | float | Decimal) else float("nan")
    except OverflowError:  # an integer of more than 308 digits
        return float("nan")
