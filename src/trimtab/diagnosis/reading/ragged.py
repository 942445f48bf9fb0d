"""Rows of lists as flat arrays by role, independent of the file format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trimtab.diagnosis.reading.cells import array_of, as_list
from trimtab.diagnosis.reading.layouts import EITHER_SHAPE, TOKEN_ROLES
from trimtab.diagnosis.reading.read_counts import ReadCounts

ABSENT, WRONG, SINGLE = 1, 2, 3
SAMPLING = ("temperature", "top_p", "top_k", "logprobs")
_NUMBERS = "fiub"
Column = Any
"""A column of a file: an arrow array, or one Python value or numpy array per row."""


@dataclass(frozen=True, eq=False)
class ListColumn:
    """One list of numbers per row, concatenated in `values`; `lengths` int64 (rows,), 0 where the row has a fault.

    fault: int8 (rows,), 0, ABSENT (no list), WRONG (not a list of numbers) or SINGLE (one number). cells: what the rows
    hold, where some may be WRONG.
    """

    values: np.ndarray
    lengths: np.ndarray
    fault: np.ndarray
    cells: Sequence[Any] = ()


@dataclass(frozen=True, eq=False)
class RowBlock:
    """A block of rows: `lists` of per-token columns and `scalars` by role, with None or NaN for a missing scalar.

    numbers: row numbers in the file, from 1.
    """

    rows: int
    lists: Mapping[str, ListColumn]
    scalars: Mapping[str, Sequence[Any] | np.ndarray]
    numbers: Sequence[int]


def build_block(columns: Mapping[str, Column], numbers: Sequence[int]) -> RowBlock:
    """Returns a block from the columns of a file by role."""
    result, single = {}, {}
    for role, given in columns.items():
        if role == "sampling":
            single |= _fields(given)
            continue
        column = _readable(given) if role in (*TOKEN_ROLES, *EITHER_SHAPE, "prompt_length") else given
        if _has_lists(column) if role in EITHER_SHAPE else role in TOKEN_ROLES:
            result[role] = _lists(column)
        elif role == "prompt_length" and _has_lists(column):  # the prompt's tokens
            prompts = _lists(column)
            single[role] = np.where(prompts.fault == 0, prompts.lengths, np.nan)
        else:
            single[role] = _scalars(column)
    return RowBlock(len(numbers), result, single, numbers)


def numbers(values: Sequence[Any] | np.ndarray) -> np.ndarray:
    """Converts scalars to float64 (rows,), NaN where a value is not a number."""
    if isinstance(values, np.ndarray) and values.dtype.kind in _NUMBERS:
        return values.astype(np.float64)
    return np.array([_number(value) for value in values], dtype=np.float64).reshape(len(values))


def _number(value: Any) -> float:
    if isinstance(value, int | float | np.number):
        try:
            return float(value)
        except OverflowError:  # an integer of more than 308 digits
            return float("nan")
    return float("nan")


def _readable(column: Column) -> Column:
    """Returns a column of numbers or of lists of numbers; as Python values where arrow holds neither."""
    if isinstance(column, pa.Array):
        if _is_number(column.type.value_type if _is_arrow_list(column) else column.type):
            return column
        column = column.to_pylist()
    return [as_list(cell) for cell in column]


def _has_lists(column: Column) -> bool:
    if isinstance(column, pa.Array):
        return _is_arrow_list(column)
    return any(isinstance(cell, list | np.ndarray) for cell in column)


def _is_arrow_list(array: pa.Array) -> bool:
    kind = array.type
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _lists(column: Column) -> ListColumn:
    """Returns the lists of a column that is readable."""
    rows = len(column)
    if not isinstance(column, pa.Array):
        arrays = [array_of(cell) for cell in column]
        lengths = np.array([0 if array is None else len(array) for array in arrays], np.int64)
        present = [array for array in arrays if array is not None]
        fault = np.array(
            [0 if a is not None else _fault(cell) for a, cell in zip(arrays, column, strict=True)], np.int8
        )
        return ListColumn(np.concatenate(present) if present else np.empty(0), lengths, fault, column)
    if not _is_arrow_list(column):
        fault = ABSENT if pa.types.is_null(column.type) else SINGLE
        return ListColumn(np.empty(0), np.zeros(rows, np.int64), np.full(rows, fault, np.int8))
    fault = np.where(column.is_null().to_numpy(zero_copy_only=False), ABSENT, 0).astype(np.int8)
    lengths = pc.fill_null(pc.call_function("list_value_length", [column]), 0).to_numpy(zero_copy_only=False)
    return ListColumn(_flat(column.flatten()), lengths.astype(np.int64), fault)


def _fault(cell: Any) -> int:
    return ABSENT if cell is None else SINGLE if isinstance(cell, int | float) else WRONG


def _scalars(column: Column) -> Sequence[Any] | np.ndarray:
    """Returns one value per row."""
    if isinstance(column, pa.Array):
        return _flat(column) if _is_number(column.type) else column.to_pylist()
    return [None if isinstance(value, np.ndarray) else value for value in column]


def _fields(column: Column) -> dict[str, Sequence[Any] | np.ndarray]:
    """Returns the sampling parameters of a struct column or of one dictionary per row; empty for another type."""
    if not isinstance(column, pa.Array):
        return {name: [row.get(name) if isinstance(row, dict) else None for row in column] for name in SAMPLING}
    if not pa.types.is_struct(column.type):
        return {}
    present = [column.type.field(index).name for index in range(column.type.num_fields)]
    return {name: _scalars(column.field(name)) for name in SAMPLING if name in present}


def _is_number(kind: pa.DataType) -> bool:
    checks = (pa.types.is_floating, pa.types.is_integer, pa.types.is_boolean, pa.types.is_null, pa.types.is_decimal)
    return any(check(kind) for check in checks)


def _flat(array: pa.Array) -> np.ndarray:
    if pa.types.is_null(array.type):
        return np.full(len(array), np.nan)
    if pa.types.is_boolean(array.type):
        array = array.cast(pa.uint8())
    if pa.types.is_decimal(array.type):
        array = array.cast(pa.float64())
    return array.to_numpy(zero_copy_only=False)


@dataclass(frozen=True, eq=False)
class FlatRows:
    """Concatenated rows: arrays in `values` have `lengths.sum()` entries, those in `single` one for each row."""

    lengths: np.ndarray
    values: dict[str, np.ndarray]
    single: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def first(self) -> np.ndarray:
        return np.cumsum(self.lengths) - self.lengths

    @property
    def row(self) -> np.ndarray:
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    def select(self, rows: np.ndarray) -> FlatRows:
        if rows.all():
            return self
        kept = self._select(np.repeat(rows, self.lengths), self.lengths[rows])
        return replace(kept, single={name: values[rows] for name, values in self.single.items()})

    def cut(self, first: np.ndarray, last: np.ndarray) -> FlatRows:
        """Returns the entries first <= i < last of each row."""
        if not first.any() and np.array_equal(last, self.lengths):
            return self
        position = np.arange(int(self.lengths.sum())) - np.repeat(self.first, self.lengths)
        inside = (position >= np.repeat(first, self.lengths)) & (position < np.repeat(last, self.lengths))
        return self._select(inside, last - first)

    def without(self, tokens: np.ndarray) -> FlatRows:
        """Returns all but the marked tokens; rows may become empty but stay."""
        if not tokens.any():
            return self
        return self._select(~tokens, self.lengths - np.bincount(self.row[tokens], minlength=len(self.lengths)))

    def _select(self, tokens: np.ndarray, lengths: np.ndarray) -> FlatRows:
        return FlatRows(lengths, {name: values[tokens] for name, values in self.values.items()}, self.single)

    def having(self, tokens: np.ndarray) -> np.ndarray:
        """Returns rows (rows,) with at least one marked token."""
        return np.bincount(self.row[tokens], minlength=len(self.lengths)) > 0


class Table(Protocol):
    """A file of rows. `names` returns its columns; `blocks` reads columns, given by role, in blocks of rows."""

    path: Path

    def names(self) -> frozenset[str]: ...

    def close(self) -> None: ...

    def blocks(self, columns: Mapping[str, str], tokens: int, tally: ReadCounts) -> Iterator[RowBlock]: ...
