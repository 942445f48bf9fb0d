"""Reads the files in which open-instruct writes the trainer's log-probs: rows that are packed, and cut into slices.

A row holds several sequences, each with its prompt. With sequence parallelism each rank writes a slice of every row to
a separate file. All lists begin at the second token of their slice, since log-probs are those of the next token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.diagnosis.reading.read_counts import UNEQUAL, ReadCounts
from trimtab.diagnosis.reading.row_files import Rows, json_lines
from trimtab.files import opened

PACKED = re.compile(r"_trainer_logprobs_step\d+(?:_rank(?P<rank>\d+))?\.jsonl(?:\.gz)?$")
"""Names of these files."""
_SLICES = re.compile(rb'"sp_size": (\d{1,4}),')
_LISTS = ("trainer_logprobs", "vllm_logprobs", "response_mask", "token_ids", "model_steps")


def slices_of(path: Path) -> list[Path]:
    """Returns the files with the slices of the same rows, in their order."""
    found = PACKED.search(path.name)
    if not found or not found["rank"]:
        return [path]
    with opened(path) as file:
        size = _SLICES.search(file.read(4096))
    count, (start, end) = (int(size[1]) if size else 0) or 1, found.span("rank")
    first = int(found["rank"]) // count * count
    names = [f"{path.name[:start]}{rank:0{end - start}d}{path.name[end:]}" for rank in range(first, first + count)]
    return [path.with_name(name) for name in names]


def packed_rows(path: Path, tally: ReadCounts) -> Rows:
    """Yields the sequences of a file, joined from all slices. A row of which a slice is missing is counted."""
    slices = [json_lines(file, tally) for file in slices_of(path)]
    for parts in zip_longest(*slices, fillvalue=(0, {})):
        line, first = max(line for line, _ in parts), parts[0][1]
        keys = [(number, row.get("step"), row.get("sample_idx")) for number, row in parts]
        is_old = "attention_mask" not in first  # such files hold the trainer's side only, and are refused later
        if any(key != keys[0] for key in keys) or (first.get("sp_size", 1) != len(slices) and not is_old):
            tally.drop("its slice in the file of another rank is missing", row=line)
        elif is_old:
            yield line, {name: value for name, value in first.items() if name != "vllm_logprobs"}
        else:
            yield from _sequences(line, [row for _, row in parts], tally)


def _sequences(line: int, slices: Sequence[Mapping[str, Any]], tally: ReadCounts) -> Rows:
    first = slices[0]
    try:
        numbers = _joined(slices, "attention_mask")
        columns = {name: _joined(slices, name) for name in _LISTS if name in first}
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
                # The first token of a later sequence was predicted from the one before it.
                span = slice(start + (start > 0), end)
                lists = {name: column[index, span] for name, column in columns.items()}
                yield line, row | lists | _versions(step, lists.get("model_steps"))


def _versions(step: Any, sampled: np.ndarray | None) -> dict[str, int]:
    """Returns the version of the trainer's weights, numbered as `model_steps`: by the step after which they were sent.

    The first weights of a run have the number of its first step too, but are not newer than the trainer's.
    """
    if sampled is None or sampled.dtype.kind != "i" or not isinstance(step, int):
        return {}
    return {"proximal_version": max(step - 1, int(sampled.max(initial=-1)))}


def _joined(slices: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
    """Returns a list of all slices (batch, time)."""
    parts = [np.array(row[name]).reshape(row[f"{name}_shape"]) for row in slices]
    return np.concatenate([np.atleast_2d(part) for part in parts], axis=1)
