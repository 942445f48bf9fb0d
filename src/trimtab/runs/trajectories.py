"""Reads and writes trajectories as parquet: the documented file of each step, and pending data of a checkpoint.

One row per trajectory. The documented columns come first; the others hold the rest of a `trimtab.types.Trajectory`, so
that reading returns bit for bit what was written. Tokens of observations have NaN log-probs and `EXTERNAL_VERSION`.
`Problem.extra` is left out: the trajectory is scored, and its problem can be looked up in the task by `prompt_id`.

Sampling masks and routed experts, which are large, are only in pending data. A sampling mask is the set of vocabulary
ids that a token was sampled from: with top-p, one to thousands, in ascending order. The file has the differences
between consecutive ids of a response, split by byte position: most differences are small, and bytes of the same
position compress best (`benchmarks/sampling_masks.py` compares other forms).
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trimtab.errors import TrimtabError
from trimtab.files import open_parquet
from trimtab.runs import atomic
from trimtab.types import (
    EXTERNAL_VERSION,
    Completion,
    FloatArray,
    IntArray,
    Problem,
    Prompt,
    SamplingParams,
    TopTokens,
    Trajectory,
)

ROW_GROUP_BYTES, ROW_GROUP_ROWS = 1 << 30, 1 << 20  # most bytes of a column, and most rows, in a row group

MASK_SIZES, MASK_STEPS = "kept", "kept_steps"
_DRIFT_COLUMNS = ("drift_mismatch", "drift_staleness")
_SAMPLING_TYPE = pa.struct(
    [("temperature", pa.float64()), ("top_p", pa.float64()), ("top_k", pa.int64()), ("logprobs", pa.string())]
)
_LIMITS_TYPE = pa.struct(
    [
        ("max_tokens", pa.int64()),
        ("stop", pa.list_(pa.string())),
        ("stop_ids", pa.list_(pa.int64())),
        ("ignore_stop", pa.bool_()),
    ]
)


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """A trajectory with the values that training added. Per-token arrays have the length of `response_ids`.

    A value must be present in all rows of a file or in none; the entropy of external traces is written as NaN.
    """

    trajectory: Trajectory
    logp_proximal: FloatArray | None = None
    logp_current: FloatArray | None = None  # of the clean policy at the first update of the batch
    advantage: float | None = None
    proximal_version: int | None = None
    # Means of log π_old/μ (mismatch) and log π/π_old (staleness), as in `StepStatistics`.
    drift: FloatArray | None = None


def write(path: Path, rows: Sequence[Row], step: int) -> None:
    """Writes the trajectory file of one step atomically. Columns without values are left out."""
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_bytes(path, _encode(rows, step, kept=False))


def read(path: Path) -> list[Row]:
    """Reads the rows of a trajectory file, the inverse of `write` except for sampling masks and routed experts.

    Raises `TrimtabError` if the file was not written by the trainer.
    """
    try:
        with open_parquet(path) as file:
            table = file.read()
    except OSError as error:
        raise TrimtabError(f"cannot read {path}: {error.strerror or error}") from None
    except pa.ArrowException as error:
        raise TrimtabError(f"{path}: not a trajectory file written by the trainer ({error})") from None
    return _decode(table, str(path))


def to_bytes(pending: Sequence[Trajectory]) -> bytes:
    """Returns trajectories that are still to be trained on as bytes for a checkpoint, without `Problem.extra`."""
    return _encode([Row(trajectory) for trajectory in pending], None, kept=True)


def from_bytes(data: bytes) -> list[Trajectory]:
    """Returns the trajectories of `to_bytes`."""
    return [row.trajectory for row in _decode(pq.read_table(pa.BufferReader(data)), "pending trajectories")]


def _encode(rows: Sequence[Row], step: int | None, *, kept: bool) -> bytes:
    """Returns the rows as a parquet file; `kept` includes sampling masks and routed experts, which are large."""
    trajectories = [row.trajectory for row in rows]
    completions = [trajectory.completion for trajectory in trajectories]
    samplings = [trajectory.sampling for trajectory in trajectories]
    problems = [trajectory.prompt.problem for trajectory in trajectories]
    lengths = [len(trajectory) for trajectory in trajectories]
    external = [trajectory.off_policy for trajectory in trajectories]
    observed = any(completion.loss_mask is not None for completion in completions)
    columns: dict[str, pa.Array | None] = {
        "step": None if step is None else pa.array([step] * len(rows), pa.int64()),
        "prompt_id": pa.array([problem.id for problem in problems], pa.string()),
        "group": pa.array([t.group for t in trajectories], pa.int64()),
        "prompt_ids": _lists([t.prompt.ids for t in trajectories], pa.int64()),
        "response_ids": _lists([c.response_ids for c in completions], pa.int64()),
        "loss_mask": _token_column("loss_mask", [t.loss_mask for t in trajectories], lengths, pa.bool_()),
        "logp_behavior": _token_column("logp_behavior", [c.logp_behavior for c in completions], lengths, pa.float32()),
        "logp_proximal": _token_column("logp_proximal", [row.logp_proximal for row in rows], lengths, pa.float32()),
        "logp_current": _token_column("logp_current", [row.logp_current for row in rows], lengths, pa.float32()),
        "entropy": _token_column("entropy", _entropies(trajectories), lengths, pa.float32()),
        "policy_version": _token_column("policy_version", [c.policy_version for c in completions], lengths, pa.int64()),
        "proximal_version": _scalar_column("proximal_version", [row.proximal_version for row in rows], pa.int64()),
        "reward": pa.array([t.reward for t in trajectories], pa.float64()),
        "advantage": _scalar_column("advantage", [row.advantage for row in rows], pa.float64()),
        "sampling": pa.array([_record(s, _SAMPLING_TYPE) for s in samplings], _SAMPLING_TYPE),
        **{
            name: _scalar_column(name, [None if row.drift is None else row.drift[part] for row in rows], pa.float32())
            for part, name in enumerate(_DRIFT_COLUMNS)
        },
        "turn": _lists([c.turn for c in completions], pa.int64()) if observed else None,
        "off_policy": pa.array(external, pa.bool_()) if any(external) else None,
        "prompt_text": pa.array([t.prompt.text for t in trajectories], pa.string()),
        "text": pa.array([c.text for c in completions], pa.string()),
        "finish": pa.array([c.finish_reason for c in completions], pa.string()),
        "rewards": pa.array([list(t.rewards.items()) for t in trajectories], pa.map_(pa.string(), pa.float64())),
        "question": pa.array([problem.question for problem in problems], pa.string()),
        "answer": pa.array([problem.answer for problem in problems], pa.string()),
        "limits": pa.array([_record(s, _LIMITS_TYPE) for s in samplings], _LIMITS_TYPE),
        **({**mask_columns(completions), **_expert_columns(completions), **_top_columns(completions)} if kept else {}),
    }
    return encode_table({name: column for name, column in columns.items() if column is not None}, completions)


def encode_table(columns: dict[str, pa.Array], completions: Sequence[Completion]) -> bytes:
    """Returns columns of these completions as a parquet file."""
    buffer = io.BytesIO()
    encoding = {f"{MASK_STEPS}.list.element": "BYTE_STREAM_SPLIT"} if MASK_STEPS in columns else None
    pq.write_table(
        pa.table(columns),
        buffer,
        compression="zstd",
        row_group_size=_row_group_size(completions),
        use_dictionary=encoding is None,  # a column has either a dictionary or another encoding
        column_encoding=encoding,
    )
    return buffer.getvalue()


def _row_group_size(completions: Sequence[Completion]) -> int:
    """Returns the rows per row group, so that no column of a group is much larger than `ROW_GROUP_BYTES`.

    Within a group readers count in 32 bits, and experts and sampling masks may exceed that.
    """
    largest = ROW_GROUP_BYTES // ROW_GROUP_ROWS
    for completion in completions:
        routes, top, mask = completion.routed_experts, completion.top, completion.sampling_mask
        sizes = (0 if routes is None else routes.nbytes, 0 if top is None else top.ids.nbytes)
        largest = max(largest, *sizes, sum(ids.nbytes for ids in mask or ()))
    return max(1, ROW_GROUP_BYTES // largest)


def _decode(table: pa.Table, name: str) -> list[Row]:
    try:
        columns = [_values(table[name]) for name in table.column_names]
        return [_row(dict(zip(table.column_names, values, strict=True))) for values in zip(*columns, strict=True)]
    except (pa.ArrowException, KeyError, TypeError, ValueError) as error:
        raise TrimtabError(f"{name}: not a trajectory file written by the trainer ({error})") from None


def _row(values: dict[str, Any]) -> Row:
    problem = Problem(id=values["prompt_id"], question=values["question"], answer=values["answer"])
    limits, external = values["limits"], bool(values.get("off_policy"))
    sampled = values["policy_version"] != EXTERNAL_VERSION
    ids, tokens = values.get("top_ids"), len(values["response_ids"])
    layers = values.get("route_layers")
    top_shape = (tokens, 0 if ids is None else len(ids) // max(1, tokens))
    observed = "turn" in values and not external and not sampled.all()
    completion = Completion(
        response_ids=values["response_ids"],
        logp_behavior=values["logp_behavior"],
        policy_version=values["policy_version"],
        finish_reason=values["finish"],
        text=values["text"],
        entropy=None if external else values.get("entropy"),
        sampling_mask=_mask(values[MASK_SIZES], values[MASK_STEPS]) if MASK_SIZES in values else None,
        routed_experts=values["routes"].reshape(-1, layers, values["route_experts"]) if layers is not None else None,
        loss_mask=sampled if observed else None,
        top=None if ids is None else TopTokens(ids.reshape(top_shape), values["top_logps"].reshape(top_shape)),
    )
    trajectory = Trajectory(
        prompt=Prompt(problem, values["prompt_text"], values["prompt_ids"]),
        group=values["group"],
        completion=completion,
        sampling=SamplingParams(
            **values["sampling"], **limits | {"stop": tuple(limits["stop"]), "stop_ids": tuple(limits["stop_ids"])}
        ),
        loss_mask=values["loss_mask"],
        reward=values["reward"],
        rewards=dict(values["rewards"]),
        off_policy=external,
    )
    return Row(
        trajectory,
        values.get("logp_proximal"),
        values.get("logp_current"),
        values.get("advantage"),
        values.get("proximal_version"),
        np.array([values[name] for name in _DRIFT_COLUMNS], np.float32) if _DRIFT_COLUMNS[0] in values else None,
    )


def _entropies(trajectories: Sequence[Trajectory]) -> list[FloatArray | None]:
    """Returns the entropies per response, with NaN for external traces if any other response has entropies."""
    entropies = [trajectory.completion.entropy for trajectory in trajectories]
    if all(entropy is None for entropy in entropies):
        return entropies
    return [
        np.full(len(trajectory), np.nan, dtype=np.float32) if trajectory.off_policy else entropy
        for trajectory, entropy in zip(trajectories, entropies, strict=True)
    ]


def mask_columns(completions: Sequence[Completion]) -> dict[str, pa.Array]:
    """Returns the columns of sampling masks: the number of ids of each token, and the differences of consecutive ids.

    Empty if no completion has a mask. Raises `ValueError` if only some completions have a mask, or if a mask does not
    have one set per token.
    """
    masks = [completion.sampling_mask for completion in completions]
    if not masks or not _all_or_none("kept", masks):
        return {}
    sizes = [np.array([len(ids) for ids in mask or ()], np.int64) for mask in masks]
    steps = [np.diff(np.concatenate([np.empty(0, np.int64), *(mask or ())]), prepend=0) for mask in masks]
    lengths = [len(completion.response_ids) for completion in completions]
    return {
        MASK_SIZES: _token_column(MASK_SIZES, sizes, lengths, pa.int64()),
        MASK_STEPS: _lists(steps, pa.int64(), large=True),
    }


def _mask(sizes: IntArray, steps: IntArray) -> tuple[IntArray, ...]:
    """Returns the sets of one row. Raises `ValueError` if the number of ids does not match the sizes."""
    ends = np.cumsum(sizes)
    if ends[-1:].sum() != len(steps):
        raise ValueError(f"{MASK_STEPS} has {len(steps)} entries, {MASK_SIZES} says {ends[-1:].sum()}")
    return tuple(np.split(np.cumsum(steps), ends[:-1])) if len(sizes) else ()


def _expert_columns(completions: Sequence[Completion]) -> dict[str, pa.Array]:
    """Returns the columns of routed experts, row-major, with their shapes; null for a completion without any."""
    routed = [completion.routed_experts for completion in completions]
    if all(routes is None for routes in routed):
        return {}
    flat = [np.empty(0, np.int16) if routes is None else routes.reshape(-1) for routes in routed]
    return {
        "routes": _lists(flat, pa.int16(), large=True),
        "route_layers": pa.array([None if routes is None else routes.shape[1] for routes in routed], pa.int32()),
        "route_experts": pa.array([None if routes is None else routes.shape[2] for routes in routed], pa.int32()),
    }


def _top_columns(completions: Sequence[Completion]) -> dict[str, pa.Array | None]:
    """Returns the columns of the most probable ids of each token and of their log-probs, row-major."""
    tops = [completion.top for completion in completions]
    if not tops or not _all_or_none("top_ids", tops):
        return {}
    return {
        "top_ids": _lists([top.ids.reshape(-1) for top in tops if top is not None], pa.int64()),
        "top_logps": _lists([top.logps.reshape(-1) for top in tops if top is not None], pa.float32()),
    }


def _record(sampling: SamplingParams, kind: pa.StructType) -> dict[str, Any]:
    return {field.name: getattr(sampling, field.name) for field in kind}


def _all_or_none(name: str, values: Sequence[Any]) -> bool:
    """Whether the column has values. Raises `ValueError` if only some rows have one."""
    present = sum(value is not None for value in values)
    if present not in (0, len(values)):
        raise ValueError(f"{name}: {present} of {len(values)} rows have it; a file needs all or none")
    return present > 0


def _scalar_column(name: str, values: Sequence[Any], kind: pa.DataType) -> pa.Array | None:
    return pa.array(values, kind) if _all_or_none(name, values) else None


def _token_column(name: str, arrays: Sequence[Any], lengths: Sequence[int], kind: pa.DataType) -> pa.Array | None:
    if arrays and not _all_or_none(name, arrays):
        return None
    for index, (array, length) in enumerate(zip(arrays, lengths, strict=True)):
        if len(array) != length:
            raise ValueError(f"{name} of row {index} has {len(array)} entries for {length} response tokens")
    return _lists(arrays, kind)


def _lists(arrays: Sequence[Any], kind: pa.DataType, *, large: bool = False) -> pa.Array:
    """Returns a column of lists; a `large` one may hold more than 2^31 values."""
    flat = np.concatenate([np.asarray(a, kind.to_pandas_dtype()) for a in arrays]) if arrays else []
    offsets = np.cumsum([0, *(len(a) for a in arrays)])
    array, index = (pa.LargeListArray, pa.int64()) if large else (pa.ListArray, pa.int32())
    return array.from_arrays(pa.array(offsets, index), pa.array(flat, kind))


def _values(column: pa.ChunkedArray) -> Sequence[Any]:
    """Returns the values per row: numpy arrays for lists of numbers, Python objects otherwise."""
    array = column.combine_chunks()
    if not pa.types.is_list(array.type) and not pa.types.is_large_list(array.type):
        return array.to_pylist()
    flat = array.values.to_numpy(zero_copy_only=False)
    return [flat[start:end].copy() for start, end in pairwise(array.offsets.to_numpy())]
