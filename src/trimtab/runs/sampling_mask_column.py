"""Sampling masks (the ids each token was sampled from) as a parquet column.

Under top-p a set holds from one to thousands of ids. They ascend, so that what is stored is the first id of each set
and the steps from one id to the next, in as few bytes as the largest needs, all lowest bytes first: most steps are
small, and bytes of one kind compress best (`benchmarks/keep_sets.py` measures this against other forms).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trimtab.types import Completion, IntArray

Sets = tuple[IntArray, ...]

_TYPE = pa.struct([("width", pa.int32()), ("sizes", pa.binary()), ("steps", pa.large_binary())])
# Eight bytes hold whatever the others do not: steps backward, too.
_KINDS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.int64}


def encode(completions: Sequence[Completion]) -> pa.Array | None:
    """A column of records, one for each completion; None where none has sets. `ValueError` where only some have, or
    one has not as many sets as tokens."""
    found = [completion.kept for completion in completions]
    if all(sets is None for sets in found):
        return None
    if lacking := sum(sets is None for sets in found):
        raise ValueError(f"kept: {len(found) - lacking} of {len(found)} rows have it; a file needs all or none")
    for index, (sets, completion) in enumerate(zip(found, completions, strict=True)):
        length = len(completion.response_ids)
        if sets is not None and len(sets) != length:
            raise ValueError(f"kept of row {index} has {len(sets)} entries for {length} response tokens")
    return pa.array([_flat(sets or ()) for sets in found], _TYPE)


def decode(value: Mapping[str, Any] | None) -> Sets | None:
    """The inverse of `encode` for one row. `ValueError` where the bytes do not fit the sizes."""
    if value is None:
        return None
    sizes = np.frombuffer(value["sizes"], np.int32).astype(np.int64)
    planes = np.frombuffer(value["steps"], np.uint8).reshape(value["width"], int(sizes.sum()))
    steps = np.ascontiguousarray(planes.T).view(_KINDS[value["width"]]).reshape(-1).astype(np.int64)
    ids, starts = steps.cumsum(), _starts(sizes)
    # Each set begins anew: take away what the sum had reached before it.
    ids -= np.repeat(ids[starts] - steps[starts], sizes[sizes > 0])
    return tuple(np.split(ids, np.cumsum(sizes)[:-1])) if len(sizes) else ()


def _flat(sets: Sequence[IntArray]) -> dict[str, Any]:
    sizes = np.array([len(ids) for ids in sets], dtype=np.int64)
    ids = np.concatenate([np.empty(0, dtype=np.int64), *sets])
    steps, starts = np.diff(ids, prepend=0), _starts(sizes)
    steps[starts] = ids[starts]
    width = _width(steps)
    planes = steps.astype(_KINDS[width]).view(np.uint8).reshape(-1, width).T
    return {"width": width, "sizes": sizes.astype(np.int32).tobytes(), "steps": planes.tobytes()}


def _starts(sizes: IntArray) -> IntArray:
    """Where sets that hold something begin."""
    return (np.cumsum(sizes) - sizes)[sizes > 0]


def _width(steps: NDArray[np.int64]) -> int:
    """Bytes of one step."""
    if len(steps) == 0:
        return 1
    return next((width for width in (1, 2, 4) if steps.min() >= 0 and steps.max() < 256**width), 8)
