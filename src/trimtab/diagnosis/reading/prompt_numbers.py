"""Numbers prompts, and the groups of responses to one prompt in one step."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from trimtab.diagnosis.reading.ragged import FlatRows, RowBlock, numbers
from trimtab.diagnosis.reading.read_counts import ReadCounts


def groups_of(block: RowBlock, flat: FlatRows, rows: np.ndarray, tally: ReadCounts, file: int) -> np.ndarray:
    """Returns numbers of prompt groups (responses,), unique over all files: per step, or per file without steps."""
    steps = numbers(block.scalars["step"])[rows].tolist() if "step" in block.scalars else None
    values = _keys(block, flat, rows, "group")
    column = block.scalars.get("group")
    named = column is None or isinstance(next(iter(column), None), str | bytes)  # a bare number counts within this data
    keys = [(steps[index] if steps else ("file", file), value) for index, value in enumerate(values)]
    return _numbered(keys if named else [(tally.own, key) for key in keys], tally.groups)


def prompts_of(block: RowBlock, flat: FlatRows, rows: np.ndarray, tally: ReadCounts) -> np.ndarray | None:
    """Returns numbers of prompts (responses,), the same in every step and file; None if they are unknown."""
    known = "prompt" in block.scalars or "prompt_key" in flat.single
    return _numbered(_keys(block, flat, rows, "prompt"), tally.prompts) if known else None


def _keys(block: RowBlock, flat: FlatRows, rows: np.ndarray, role: str) -> list[Hashable]:
    """Returns what tells groups or prompts apart (responses,): a column, or else the prompt's tokens."""
    column = block.scalars.get(role)
    values = flat.single["prompt_key"].tolist() if column is None else [column[row] for row in rows.tolist()]
    return [_key(value, index) for index, value in enumerate(values)]


def _numbered(keys: Sequence[Hashable], known: dict[Hashable, int]) -> np.ndarray:
    """Returns the number of each key (keys,); new ones are added to `known`."""
    return np.array([known.setdefault(key, len(known)) for key in keys], dtype=np.int64)


def _key(value: object, row: int) -> Hashable:
    """Returns the key of a group. A response without a group forms its own."""
    if value is None or value != value:
        return ("alone", row, object())
    if isinstance(value, str | bytes):
        return hash(value)  # prompts are long, and only their equality matters
    return value if isinstance(value, Hashable) else hash(repr(value))
