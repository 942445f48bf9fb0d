"""The experts of a trajectory's tokens as a parquet column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from trimtab.types import ExpertArray, Trajectory

# Indices of one trajectory, row by row, in the narrowest type that holds them. Not a list column: its offsets and
# validity would be read number by number, which takes a hundred times as long.
_TYPE = pa.struct([("layers", pa.int32()), ("chosen", pa.int32()), ("width", pa.int32()), ("data", pa.large_binary())])
_KINDS: dict[int, Any] = {1: np.uint8, 2: np.int16}


def encode(trajectories: Sequence[Trajectory]) -> pa.Array | None:
    """A column of records, null where a trajectory has none; None where all have none."""
    found = [trajectory.completion.routes for trajectory in trajectories]
    if all(routes is None for routes in found):
        return None
    return pa.array([None if routes is None else _flat(routes) for routes in found], _TYPE)


def decode(value: Mapping[str, Any] | None) -> ExpertArray | None:
    """The inverse of `encode` for one row. `ValueError` where the bytes do not fit the shape."""
    if value is None:
        return None
    flat = np.frombuffer(value["data"], _KINDS[value["width"]]).astype(np.int16)
    return flat.reshape(-1, value["layers"], value["chosen"])


def stored_bytes(trajectories: Sequence[Trajectory]) -> int:
    """What the record of these takes in memory of the trainer's files, before compression."""
    found = [trajectory.completion.routes for trajectory in trajectories]
    return sum(routes.size * _width(routes) for routes in found if routes is not None)


def _flat(routes: ExpertArray) -> dict[str, Any]:
    _, layers, chosen = routes.shape
    width = _width(routes)
    return {"layers": layers, "chosen": chosen, "width": width, "data": routes.astype(_KINDS[width]).tobytes()}


def _width(routes: ExpertArray) -> int:
    """Bytes of one index."""
    return 1 if routes.size == 0 or (routes.min() >= 0 and routes.max() < 256) else 2
