"""Parquet columns of what is large: sampling masks and routed experts of trajectories, packed into bytes.

A sampling mask is the set of vocabulary ids that a token was sampled from. Under top-p it has from one to thousands of
ids, in ascending order. Stored are the first id of each set and the differences between consecutive ids, in as few
bytes as the largest difference needs, grouped by byte position, lowest bytes first: most differences are small, and
bytes of one position compress best (`benchmarks/sampling_masks.py` compares other encodings).

The experts of a trajectory are stored row-major in the narrowest type that holds them. A list column would take a
hundred times as long to read because of its offsets and validity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from trimtab.types import Completion, ExpertArray, IntArray, Trajectory

Sets = tuple[IntArray, ...]

_MASK_TYPE = pa.struct([("width", pa.int32()), ("sizes", pa.binary()), ("steps", pa.large_binary())])
# Eight bytes also hold negative differences.
_STEP_TYPES: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.int64}
_EXPERT_TYPE = pa.struct(
    [("layers", pa.int32()), ("chosen", pa.int32()), ("width", pa.int32()), ("data", pa.large_binary())]
)
_INDEX_TYPES: dict[int, Any] = {1: np.uint8, 2: np.int16}


def encode_masks(completions: Sequence[Completion]) -> pa.Array | None:
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
    return pa.array([_mask_record(sets or ()) for sets in masks], _MASK_TYPE)


def decode_mask(value: Mapping[str, Any] | None) -> Sets | None:
    """Returns the sets of one row, the inverse of `encode_masks`.

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


def _mask_record(sets: Sequence[IntArray]) -> dict[str, Any]:
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


def encode_experts(completions: Sequence[Completion]) -> pa.Array | None:
    """Returns a column of records, null for a completion without routed experts; None if all have none."""
    routed_experts = [completion.routed_experts for completion in completions]
    if all(routes is None for routes in routed_experts):
        return None
    records: list[dict[str, Any] | None] = []
    for routes in routed_experts:
        if routes is None:
            records.append(None)
            continue
        _, layers, chosen = routes.shape
        width = _index_bytes(routes)
        data = routes.astype(_INDEX_TYPES[width]).tobytes()
        records.append({"layers": layers, "chosen": chosen, "width": width, "data": data})
    return pa.array(records, _EXPERT_TYPE)


def decode_experts(value: Mapping[str, Any] | None) -> ExpertArray | None:
    """Returns the routed experts of one row, the inverse of `encode_experts`.

    Raises `ValueError` if the number of bytes does not match the shape.
    """
    if value is None:
        return None
    flat = np.frombuffer(value["data"], _INDEX_TYPES[value["width"]]).astype(np.int16)
    return flat.reshape(-1, value["layers"], value["chosen"])


def stored_bytes(trajectories: Sequence[Trajectory]) -> int:
    """Returns the size in bytes of the column of experts before compression."""
    routed_experts = [trajectory.completion.routed_experts for trajectory in trajectories]
    return sum(routes.size * _index_bytes(routes) for routes in routed_experts if routes is not None)


def _index_bytes(routes: ExpertArray) -> int:
    """Returns the bytes per index."""
    return 1 if routes.size == 0 or (routes.min() >= 0 and routes.max() < 256) else 2
