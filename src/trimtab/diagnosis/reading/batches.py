"""Rows of a file as arrow arrays by role, in whatever format their cells were written, and counts of rows left out."""

from __future__ import annotations

import ast
import json
import re
import reprlib
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trimtab.diagnosis.reading.layouts import EITHER_SHAPE, SAMPLING, TOKEN_ROLES
from trimtab.diagnosis.records import finding
from trimtab.diagnosis.tokens import MAX_ROUNDED_LOGP
from trimtab.errors import Finding

EXTERNAL_TRACE, NOT_FINITE = "external trace (off_policy)", "no finite log-prob at any trained token"
OUT_OF_LOSS = "no part of the loss (sample_mask 0)"
NO_LIST, ONE_NUMBER = "is not a list of numbers", "not a list of numbers but one number"
UNEQUAL = "lists of different lengths"
"""Reasons to drop a response."""
_ENOUGH = 100  # trained tokens from which on log-probs without a single fraction are rounded
ODD_FILES = ("no-rows", "empty", "no-trainer", "several-versions")


@dataclass(eq=False)
class ValueCounts:
    """Counts of the log-probs of one column at trained tokens: those above 0, those with a fraction, and the range."""

    above: int = 0
    fractions: int = 0
    lowest: float = np.inf
    highest: float = -np.inf

    def add(self, values: np.ndarray) -> None:
        """Adds finite values (tokens,), at least one."""
        self.above += int((values > MAX_ROUNDED_LOGP).sum())
        self.fractions += int((values != np.rint(values)).sum())
        self.lowest = min(self.lowest, float(values.min()))
        self.highest = max(self.highest, float(values.max()))


@dataclass(eq=False)
class ReadCounts:
    """Counts that are updated while files are read.

    values: by column of log-probs. odd: files and responses, by key of findings.toml. k3_sum: of the trained tokens. file: the one being read. first:
    the first row dropped for each reason. groups, prompts: their numbers over all files, in the order of first
    occurrence; those of prompts may be shared with other data. quotes: whether messages name files and quote their
    cells. seen: the file of each response, by its id or a hash of its content.
    """

    responses: int = 0
    tokens: int = 0
    trained: int = 0
    equal: int = 0
    zero: int = 0
    zero_trainer: int = 0
    k3_sum: float = 0.0
    dropped: Counter[str] = field(default_factory=Counter)
    odd: Counter[str] = field(default_factory=Counter)
    nonfinite: Counter[str] = field(default_factory=Counter)
    unknown: Counter[str] = field(default_factory=Counter)
    values: dict[str, ValueCounts] = field(default_factory=dict)
    file: Path | None = None
    first: dict[str, str] = field(default_factory=dict)
    quotes: bool = True
    groups: dict[Hashable, int] = field(default_factory=dict)
    prompts: dict[Hashable, int] = field(default_factory=dict)
    seen: dict[Hashable, int] = field(default_factory=dict)

    def fresh(self) -> ReadCounts:
        """Returns the counts before any row was read."""
        return ReadCounts(odd=Counter({"empty": self.odd["empty"]}), quotes=self.quotes, prompts=self.prompts)

    def drop(self, reason: str, count: int = 1, row: int | None = None, detail: str = "") -> None:
        """Counts dropped responses; `row`, `detail`: number of the first one in the current file, and its values."""
        if count:
            self.dropped[reason] += count
            if row is not None and self.file is not None:
                quoted = f" of {self.file.name}{detail and f': {detail}'}" if self.quotes else ""
                self.first.setdefault(reason, f"row {row}{quoted}")

    def reasons(self, most: int) -> str:
        """Lists the most common reasons, each with the first row dropped for it."""
        items = [
            f"{count} x {reason}" + (f" (first: {self.first[reason]})" if reason in self.first else "")
            for reason, count in self.dropped.most_common(most)
        ]
        return "; ".join(items)

    def findings(self, anchor: str) -> list[Finding]:
        """Returns anomalies of the data."""
        all_equal, all_zero = (self.trained and count == self.trained for count in (self.equal, self.zero))
        whole = [name for name, of in self.values.items() if not of.fractions and self.trained >= _ENOUGH]
        return [
            *(
                finding("above-0", column=name, count=of.above, trained=self.trained, largest=of.highest)
                for name, of in self.values.items()
                if of.above
            ),
            *([finding("whole-numbers", columns=" and ".join(whole))] if whole and not all_zero else []),
            *(
                finding("not-a-number", column=name, count=count, responses=self.responses)
                for name, count in self.unknown.items()
                if count
            ),
            *([finding("not-finite", count=self.odd["not-finite"])] if self.odd["not-finite"] else []),
            *([finding("equal-columns", anchor=anchor, trained=self.trained)] if all_equal else []),
            *([finding("zeros")] if all_zero else []),
            *(finding(key, count=self.odd[key]) for key in ODD_FILES if self.odd[key]),
            *(finding("dropped", reason=reason, place=place) for reason, place in self.first.items()),
        ]


_WORDS = {"true": True, "false": False, "none": None, "null": None}
WANTED = (
    "(wanted in each row: a list such as [-0.1, -0.2], the same as text, or a list of records with token and logprob)"
)
_ARRAY = re.compile(r"(?:np\.)?(?:array|tensor)\((\[.*\])(?:,\s*dtype=[\w.]+)?\)", re.DOTALL)
_SCALAR = re.compile(r"np\.float\d+\(([^()]*)\)")
_IN_A_RESPONSE = ("choices", "logprobs", "meta_info", "content", "refusal", "token_logprobs", "output_token_logprobs")
"""Keys of OpenAI's and SGLang's responses that lead to the log-probs, the outer ones first."""
_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = 60
_SHOWN.maxlist = _SHOWN.maxdict = 3


def as_list(cell: Any) -> Any:
    """Returns the list that a cell holds, as a list of numbers where it can be read as one; other cells unchanged.

    Text is a list as written by JSON, Python or numpy. A record is `{"token", "logprob"}` as OpenAI's servers write it,
    `[logprob, id, text]` as SGLang does, or `{id: {"logprob"}}` as vLLM does; lists of them may be in a response. Those
    of a conversation, a list of messages and choices, are joined.
    """
    value = _records(_parse(cell.strip()) if isinstance(cell, str) else cell)
    if isinstance(value, list) and isinstance(next((item for item in value if item is not None), None), dict | list):
        value = [_logprob(item) for item in value]
    return value if isinstance(value, list) else cell


def _records(value: Any) -> Any:
    """Returns the list in a server's response, or the lists of a conversation joined; other values unchanged."""
    value = _list_inside(value)
    if not isinstance(value, list) or not isinstance(next(iter(value), None), dict):
        return value
    scored = [item for item in value if isinstance(item, dict) and item.get("logprobs")]
    if not scored or any(item.get("index") for item in scored):  # several choices do not tell which was trained on
        return value
    parts = [_list_inside(item["logprobs"]) for item in scored]
    return [record for part in parts for record in part] if all(isinstance(part, list) for part in parts) else value


def _list_inside(value: Any) -> Any:
    while isinstance(value, dict):
        inner = next((value[name] for name in _IN_A_RESPONSE if isinstance(value.get(name), list | dict)), None)
        if inner is None:
            break
        value = inner
    return value


def number_list(text: str) -> list[Any] | None:
    """Returns numbers, booleans and nulls as written by JSON, Python or numpy; None for other text."""
    if match := _ARRAY.fullmatch(text):
        text = match[1]
    if not (text.startswith("[") and text.endswith("]")):
        return None
    inner = _SCALAR.sub(r"\1", text[1:-1]).strip()
    parts = inner.split("," if "," in inner else None)
    try:
        return [_WORDS[word] if (word := part.strip().lower()) in _WORDS else _parsed_number(word) for part in parts]
    except ValueError:
        return None


def _parsed_number(text: str) -> int | float:
    """Parses a number; token ids stay integers."""
    return int(text) if text.lstrip("-").isdecimal() and len(text) < 19 else float(text)


def csv_cell(text: str) -> Any:
    """Parses a cell: a list of numbers, an object, a number, None for an empty one, or text."""
    text = text.strip()
    if (numbers := number_list(text)) is not None:
        return numbers
    if (word := text.lower()) in _WORDS:
        return _WORDS[word]
    try:
        return json.loads(text) if text.startswith("{") else _parsed_number(text) if text else None
    except (ValueError, RecursionError):
        return text


def plain(value: Any) -> Any:
    """Converts a tensor to an array, and a tensor or array without dimensions to a number."""
    if hasattr(value, "detach"):
        tensor = value.detach()
        value = (tensor.float() if tensor.is_floating_point() else tensor).numpy()
    return value.item() if isinstance(value, np.ndarray) and value.ndim == 0 else value


def array_of(cell: Any) -> np.ndarray | None:
    """Returns the numbers of a list or array, also written as text, None among them as NaN; None for anything else.

    Text that is no finite number, as "NaN", makes it something else: it is a cell to be looked at.
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
    """Returns a cell in short, for a message: of numbers written as text, the first one that is none."""
    if isinstance(cell, list) and any(isinstance(item, str) for item in cell):
        wrong = (place for place, item in enumerate(cell) if array_of([item]) is None)
        if (place := next(wrong, None)) is not None:
            return f"{_SHOWN.repr(cell[place])} at place {place + 1} of {len(cell)}"
    return _SHOWN.repr(cell)


def _parse(text: str) -> Any:
    if (numbers := number_list(text)) is not None:
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
    if (
        isinstance(item, list | tuple)
        and len(item) == 3
        and isinstance(item[1], int)
        and isinstance(item[2], str | None)
    ):
        return item[0]
    return item


_LISTS = (*TOKEN_ROLES, *EITHER_SHAPE, "prompt_length")
_ALWAYS_LISTS = set(TOKEN_ROLES) - set(EITHER_SHAPE)
Column = Any
"""A column of a file: an arrow array, or one Python value or numpy array per row."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of a file: lists of numbers, null where there is none, and float64 (rows,), NaN where unknown, by role.

    numbers: row numbers in the file, from 1. keys: hashes of groups and prompts, and the ids of prompts, object (rows,), None where unknown.
    faults: rows without a list by reason, each with what it holds instead.
    """

    numbers: Sequence[int]
    lists: Mapping[str, pa.Array]
    scalars: Mapping[str, np.ndarray]
    keys: Mapping[str, np.ndarray]
    faults: Mapping[str, Mapping[int, str]]

    def roles(self) -> set[str]:
        return {*self.lists, *self.scalars, *self.keys}

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


def _is_number_list(column: Column) -> bool:
    kind = column.type if isinstance(column, pa.Array) else pa.null()
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        return False
    kind = kind.value_type
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
