"""Builds the columns of a `Chunk` from the remaining tokens and rows."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import numpy as np

from trimtab.diagnosis.reading.flat import Flat
from trimtab.diagnosis.reading.ragged import SAMPLING, Block, numbers
from trimtab.diagnosis.reading.read_counts import Tally
from trimtab.diagnosis.records import Chunk


def chunk_of(flat: Flat, block: Block, rows: np.ndarray, roles: frozenset[str], tally: Tally, file: int) -> Chunk:
    def number(role: str) -> np.ndarray | None:
        if role not in block.scalars:
            return None
        values = numbers(block.scalars[role])[rows]
        tally.unknown[role] += int((~np.isfinite(values)).sum())
        return values

    def whole(role: str) -> np.ndarray | None:
        return _integers(block.scalars[role], rows) if role in block.scalars else None

    sampling = _sampling(block, rows, roles)
    ids = flat.values.get("response_ids")
    return Chunk(
        starts=np.concatenate([[0], np.cumsum(flat.lengths)]).astype(np.int64),
        mask=flat.values["trained"],
        behavior=flat.values["logp_behavior"],
        proximal=flat.values.get("logp_proximal"),
        current=flat.values.get("logp_current"),
        ids=None if ids is None else as_integers(ids),
        entropy=flat.values.get("entropy"),
        version=_version(flat, block, rows),
        step=whole("step"),
        group=_groups(block, rows, tally, file) if "group" in roles else None,
        proximal_version=whole("proximal_version"),
        reward=number("reward"),
        advantage=_advantage(flat) if "advantage" in flat.values else number("advantage"),
        temperature=sampling.get("temperature"),
        top_p=sampling.get("top_p"),
        top_k=sampling.get("top_k"),
        raw=sampling.get("raw"),
    )


def _version(flat: Flat, block: Block, rows: np.ndarray) -> np.ndarray | None:
    if "policy_version" in block.scalars:
        return np.repeat(_integers(block.scalars["policy_version"], rows), flat.lengths)
    values = flat.values.get("policy_version")
    return None if values is None else as_integers(values)


def _sampling(block: Block, rows: np.ndarray, roles: frozenset[str]) -> Mapping[str, np.ndarray]:
    """Sampling parameters (responses,): NaN for an unknown temperature or top_p, 0 for an unknown top_k."""
    wanted = SAMPLING if "sampling" in roles else tuple(name for name in SAMPLING if name in roles)
    found: dict[str, np.ndarray] = {}
    for name in wanted:
        values = block.scalars.get(name, np.full(block.rows, np.nan))
        if name == "logprobs":
            found["raw"] = np.array([value == "raw" for value in values], dtype=np.bool_)[rows]
        elif name == "top_k":
            found[name] = as_integers(np.nan_to_num(numbers(values)[rows], nan=0))
        else:
            found[name] = numbers(values)[rows]
    return found


def _groups(block: Block, rows: np.ndarray, tally: Tally, file: int) -> np.ndarray:
    """Numbers of prompt groups over all files (responses,): a group is a step's, or a file's without steps."""
    values = block.scalars["group"]
    steps = numbers(block.scalars["step"]).tolist() if "step" in block.scalars else None
    keys = ((steps[row] if steps else ("file", file), _key(values[row], row)) for row in rows.tolist())
    return np.fromiter((tally.group(key) for key in keys), dtype=np.int64, count=len(rows))


def _key(value: object, row: int) -> Hashable:
    """What tells a group from others. A response without one is a group by itself."""
    if value is None or value != value:
        return ("alone", row, object())
    if isinstance(value, str | bytes):
        return hash(value)  # prompts are long, and only told apart here
    return value if isinstance(value, Hashable) else hash(repr(value))


def _advantage(flat: Flat) -> np.ndarray:
    """The mean advantage of each response's trained tokens (responses,)."""
    trained = flat.values["trained"]
    with np.errstate(over="ignore", invalid="ignore"):
        values = np.where(trained, flat.values["advantage"].astype(np.float64), 0)
        total = np.bincount(flat.row, weights=values, minlength=len(flat.lengths))
    return total / np.bincount(flat.row, weights=trained, minlength=len(flat.lengths))


def _integers(values: object, rows: np.ndarray) -> np.ndarray:
    return as_integers(numbers(values)[rows])  # type: ignore[arg-type]


def as_integers(values: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # beyond 64 bits: no id, version or step is
        return values.astype(np.int64)
