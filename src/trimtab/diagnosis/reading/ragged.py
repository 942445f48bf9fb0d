"""Rows of lists as flat arrays by role, independent of the file format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trimtab.diagnosis.reading.layouts import EITHER_SHAPE, TOKEN_ROLES
from trimtab.diagnosis.reading.read_counts import ReadCounts

ABSENT, WRONG, SINGLE = 1, 2, 3
SAMPLING = ("temperature", "top_p", "top_k", "logprobs")
_NUMBERS = "fiub"


@dataclass(frozen=True, eq=False)
class ListColumn:
    """One list of numbers per row, concatenated in `values`; `lengths` int64 (rows,), 0 where the row has a fault.

    fault: int8 (rows,), 0, ABSENT (no list), WRONG (not a list of numbers) or SINGLE (one number).
    """

    values: np.ndarray
    lengths: np.ndarray
    fault: np.ndarray


@dataclass(frozen=True, eq=False)
class RowBlock:
    """A block of rows: `lists` of per-token columns and `scalars` by role, with None or NaN for a missing scalar.

    numbers: row numbers in the file, from 1.
    """

    rows: int
    lists: Mapping[str, ListColumn]
    scalars: Mapping[str, Sequence[Any] | np.ndarray]
    numbers: Sequence[int]


C = TypeVar("C")


def build_block(
    columns: Mapping[str, C],
    numbers: Sequence[int],
    *,
    is_list: Callable[[C], bool],
    lists: Callable[[C], ListColumn],
    scalars: Callable[[C], Sequence[Any] | np.ndarray],
    fields: Callable[[C], Mapping[str, Sequence[Any] | np.ndarray]],
) -> RowBlock:
    """Returns a block from the columns of a file by role and the functions that convert a column of its format."""
    result, single = {}, {}
    for role, column in columns.items():
        if role == "sampling":
            single |= fields(column)
        elif is_list(column) if role in EITHER_SHAPE else role in TOKEN_ROLES:
            result[role] = lists(column)
        elif role == "prompt_length" and is_list(column):  # the prompt's tokens
            prompts = lists(column)
            single[role] = np.where(prompts.fault == 0, prompts.lengths, np.nan)
        else:
            single[role] = scalars(column)
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


def is_arrow_list(array: pa.Array) -> bool:
    kind = array.type
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def arrow_lists(array: pa.Array) -> ListColumn:
    """Returns the lists of an arrow column of any type."""
    kind, rows = array.type, len(array)
    if not is_arrow_list(array):
        fault = ABSENT if pa.types.is_null(kind) else SINGLE if _is_number(kind) else WRONG
        return ListColumn(np.empty(0), np.zeros(rows, np.int64), np.full(rows, fault, np.int8))
    fault = np.where(array.is_null().to_numpy(zero_copy_only=False), ABSENT, 0).astype(np.int8)
    if not _is_number(kind.value_type):
        return ListColumn(np.empty(0), np.zeros(rows, np.int64), np.where(fault, fault, WRONG).astype(np.int8))
    lengths = (
        pc.fill_null(pc.call_function("list_value_length", [array]), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    )
    return ListColumn(_flat(array.flatten()), lengths, fault)


def arrow_scalars(array: pa.Array) -> Sequence[Any] | np.ndarray:
    """Returns one value per row of an arrow column of any type."""
    return _flat(array) if _is_number(array.type) else array.to_pylist()


def arrow_fields(array: pa.Array) -> dict[str, Sequence[Any] | np.ndarray]:
    """Returns the sampling parameters of a struct column; empty for another type."""
    if not pa.types.is_struct(array.type):
        return {}
    present = [array.type.field(index).name for index in range(array.type.num_fields)]
    return {name: arrow_scalars(array.field(name)) for name in SAMPLING if name in present}


def python_lists(rows: Sequence[Any]) -> ListColumn:
    """Returns the lists of Python values; None in a list of numbers becomes NaN."""
    fault = np.array([_fault(row) for row in rows], np.int8)
    values = _concatenate([row for row, bad in zip(rows, fault, strict=True) if not bad])
    if values is None:  # some value is not a number: convert each row separately
        arrays = [_concatenate([row]) if not bad else None for row, bad in zip(rows, fault, strict=True)]
        fault = np.array([bad or (WRONG if a is None else 0) for a, bad in zip(arrays, fault, strict=True)], np.int8)
        return _from_arrays(arrays, fault)
    lengths = np.array([0 if bad else len(row) for row, bad in zip(rows, fault, strict=True)], np.int64)
    return ListColumn(values, lengths, fault)


def _fault(row: Any) -> int:
    if isinstance(row, list):
        return 0
    return ABSENT if row is None else SINGLE if isinstance(row, int | float) else WRONG


def array_lists(rows: Sequence[np.ndarray | None]) -> ListColumn:
    """Returns lists given as arrays; an array of more dimensions or not of numbers is WRONG."""
    usable = [row if row is not None and row.ndim == 1 and row.dtype.kind in _NUMBERS else None for row in rows]
    faults = [ABSENT if row is None else WRONG if ok is None else 0 for row, ok in zip(rows, usable, strict=True)]
    return _from_arrays(usable, np.array(faults, np.int8))


def python_fields(rows: Sequence[Any]) -> dict[str, list[Any]]:
    """Returns the sampling parameters of one dictionary per row."""
    return {name: [row.get(name) if isinstance(row, dict) else None for row in rows] for name in SAMPLING}


def _from_arrays(arrays: Sequence[np.ndarray | None], fault: np.ndarray) -> ListColumn:
    lengths = np.array([0 if array is None else len(array) for array in arrays], np.int64)
    present = [array for array in arrays if array is not None]
    return ListColumn(np.concatenate(present) if present else np.empty(0), lengths, fault)


def _concatenate(rows: list[list[Any]]) -> np.ndarray | None:
    """Returns all numbers of the rows in one array, None read as NaN; None if some value is not a number."""
    flat = list(chain.from_iterable(rows))
    try:
        values = np.array(flat)
    except ValueError:  # lists within
        return None
    if not flat or values.dtype.kind in _NUMBERS:
        return values if values.ndim == 1 else None
    if values.dtype.kind == "O" and all(value is None or isinstance(value, int | float) for value in flat):
        try:
            return np.array(flat, dtype=np.float64)
        except OverflowError:  # an integer of more than 308 digits
            return None
    return None


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
