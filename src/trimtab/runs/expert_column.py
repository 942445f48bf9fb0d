"""Encodes the routed experts of trajectories as a parquet column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from trimtab.types import ExpertArray, Trajectory

# Expert indices of one trajectory, row-major, in the narrowest type that holds them. A list column would take a hundred
# times as long to read because of its offsets and validity.
_TYPE = pa.struct([("layers", pa.int32()), ("chosen", pa.int32()), ("width", pa.int32()), ("data", pa.large_binary())])
_INDEX_TYPES: dict[int, Any] = {1: np.uint8, 2: np.int16}


def encode(trajectories: Sequence[Trajectory]) -> pa.Array | None:
    """Returns a column of records, null for a trajectory without routed experts; None if all have none."""
    routed_experts = [trajectory.completion.routed_experts for trajectory in trajectories]
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
    return pa.array(records, _TYPE)


def decode(value: Mapping[str, Any] | None) -> ExpertArray | None:
    """Returns the routed experts of one row, the inverse of `encode`.

    Raises `ValueError` if the number of bytes does not match the shape.
    """
    if value is None:
        return None
    flat = np.frombuffer(value["data"], _INDEX_TYPES[value["width"]]).astype(np.int16)
    return flat.reshape(-1, value["layers"], value["chosen"])


def stored_bytes(trajectories: Sequence[Trajectory]) -> int:
    """Returns the size in bytes of the column before compression."""
    routed_experts = [trajectory.completion.routed_experts for trajectory in trajectories]
    return sum(routes.size * _index_bytes(routes) for routes in routed_experts if routes is not None)


def _index_bytes(routes: ExpertArray) -> int:
    """Returns the bytes per index."""
    return 1 if routes.size == 0 or (routes.min() >= 0 and routes.max() < 256) else 2
