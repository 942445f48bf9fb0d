"""Encodes sampling masks (the vocabulary ids each token was sampled from) as a parquet column.

Under top-p a set has from one to thousands of ids, in ascending order. Stored are the first id of each set and the
differences between consecutive ids, in as few bytes as the largest difference needs, grouped by byte position, lowest
bytes first: most differences are small, and bytes of one position compress best (`benchmarks/sampling_masks.py`
compares other encodings).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from trimtab.types import Completion, IntArray

Sets = tuple[IntArray, ...]

_TYPE = pa.struct([("width", pa.int32()), ("sizes", pa.binary()), ("steps", pa.large_binary())])
# Eight bytes also hold negative differences.
_STEP_TYPES: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.int64}


def encode(completions: Sequence[Completion]) -> pa.Array | None:
    """Returns a column with one record per completion; None if no completion has a sampling mask.

    Raises `ValueError` if only some have one, or if one does not have as many sets as tokens.
    """
    masks = [completion.sampling_mask for completion in completions]
    if all(sets is None for sets in masks):
        return None
    if missing := sum(sets is None for sets in masks):
        raise ValueError(f"kept: {len(masks) - missing} of {len(masks)} rows have it; a file needs all or none")
    for index, (sets, completion) in enumerate(zip(masks, completions, strict=True)):
        length = len(completion.response_ids)
        if sets is not None and len(sets) != length:
            raise ValueError(f"kept of row {index} has {len(sets)} entries for {length} response tokens")
    return pa.array([_record(sets or ()) for sets in masks], _TYPE)


def decode(value: Mapping[str, Any] | None) -> Sets | None:
    """Returns the sets of one row, the inverse of `encode`.

    Raises `ValueError` if the number of bytes does not match the sizes.
    """
    if value is None:
        return None
    sizes = np.frombuffer(value["sizes"], np.int32).astype(np.int64)
    planes = np.frombuffer(value["steps"], np.uint8).reshape(value["width"], int(sizes.sum()))
    steps = np.ascontiguousarray(planes.T).view(_STEP_TYPES[value["width"]]).reshape(-1).astype(np.int64)
    ids, starts = steps.cumsum(), _starts(sizes)
    # The cumulative sum runs over all sets: subtract its value before each set.
    ids -= np.repeat(ids[starts] - steps[starts], sizes[sizes > 0])
    return tuple(np.split(ids, np.cumsum(sizes)[:-1])) if len(sizes) else ()


def _record(sets: Sequence[IntArray]) -> dict[str, Any]:
    sizes = np.array([len(ids) for ids in sets], dtype=np.int64)
    ids = np.concatenate([np.empty(0, dtype=np.int64), *sets])
    steps, starts = np.diff(ids, prepend=0), _starts(sizes)
    steps[starts] = ids[starts]
    narrow = len(steps) == 0 or steps.min() >= 0
    largest = steps.max(initial=0)
    width = next((size for size in (1, 2, 4) if narrow and largest < 256**size), 8)
    planes = steps.astype(_STEP_TYPES[width]).view(np.uint8).reshape(-1, width).T
    return {"width": width, "sizes": sizes.astype(np.int32).tobytes(), "steps": planes.tobytes()}


def _starts(sizes: IntArray) -> IntArray:
    """Returns the index of the first id of each set that is not empty."""
    return (np.cumsum(sizes) - sizes)[sizes > 0]
