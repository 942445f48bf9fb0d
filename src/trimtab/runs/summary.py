"""One run in a few numbers, and the table of these numbers for an experiment (`results.parquet`)."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from trimtab.errors import TrimtabError
from trimtab.files import open_parquet
from trimtab.runs import atomic
from trimtab.runs.reader import Run

Status = Literal["done", "diverged", "failed"]


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The summary of one run; None means not measured.

    A mismatch metric is the value at the last step that measured it; `NAME_worst` is the worst of the run (lowest ESS).
    """

    status: Status  # diverged: updates were no longer finite, a valid result; failed: any other error
    error: str = ""
    steps: int = 0
    updates: int = 0
    seconds: float = 0.0  # wall clock, including start and evaluations
    processor_seconds: float = 0.0  # CPU time of its process, including start and evaluations
    accuracy_before: float | None = None
    accuracy: float | None = None  # the last value of the curve; None unless done
    accuracy_best: float | None = None
    curve_steps: tuple[int, ...] = ()
    curve: tuple[float, ...] = ()  # held-out greedy accuracy by step, step 0 before training
    reward: float | None = None  # mean over the last tenth of the steps
    k3: float | None = None
    k3_worst: float | None = None
    chi2: float | None = None
    chi2_worst: float | None = None
    ess: float | None = None
    ess_worst: float | None = None
    log_ratio_seq: float | None = None
    log_ratio_seq_worst: float | None = None
    grad_norm_max: float | None = None
    clipped: float | None = None  # mean share of tokens
    rejected: float | None = None  # mean share of tokens
    skipped: int = 0


_MISMATCH = (
    ("k3", "mismatch/k3", max),
    ("chi2", "mismatch/chi2_token", max),
    ("ess", "mismatch/ess_token", min),
    ("log_ratio_seq", "mismatch/log_ratio_seq_max", max),
)


def summarize(run: Run, status: Status, seconds: float, error: str = "") -> RunSummary:
    """Returns the summary of a run."""
    rows = run.rows
    curve = run.held_out
    values = curve.values.tolist()

    def series(key: str) -> list[float]:
        return run.series(key)[1].tolist()

    mismatch: dict[str, Any] = {}
    for name, key, worst in _MISMATCH:
        if measured := series(key):
            mismatch |= {name: measured[-1], f"{name}_worst": worst(measured)}
    rewards = series("reward/mean")
    return RunSummary(
        status=status,
        error=error,
        steps=len(rows),
        updates=int(rows[-1].get("updates", 0)) if rows else 0,
        seconds=seconds,
        accuracy_before=curve.before,
        accuracy=curve.after if status == "done" else None,
        accuracy_best=max(values, default=None),
        curve_steps=tuple(int(step) for step in curve.steps),
        curve=tuple(values),
        reward=_mean(rewards[-max(1, len(rewards) // 10) :]),
        grad_norm_max=max(series("optim/grad_norm"), default=None),
        clipped=_mean(run.clipped()[1].tolist()),
        rejected=_mean(series("reject/tokens")),
        skipped=int(sum(series("optim/skipped"))),
        **mismatch,
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


TABLE = "results.parquet"
_TYPES = {
    "str": pa.string(),
    "Status": pa.string(),
    "int": pa.int64(),
    "float": pa.float64(),
    "float | None": pa.float64(),
    "tuple[int, ...]": pa.list_(pa.int64()),
    "tuple[float, ...]": pa.list_(pa.float64()),
}
SCHEMA = pa.schema(
    [
        ("method", pa.string()),
        ("objective", pa.string()),
        ("keywords", pa.string()),
        ("regime", pa.string()),
        ("regime_description", pa.string()),
        ("seed", pa.int64()),
        ("run", pa.string()),
        ("planned_steps", pa.int64()),
        *((field.name, _TYPES[str(field.type)]) for field in fields(RunSummary)),
    ]
)
# Columns that the page of an experiment needs; tables of other versions may lack others.
_REQUIRED = ("method", "regime", "seed", "status", "error", "accuracy_before", "accuracy", "curve_steps", "curve")


def write_table(folder: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Replaces `results.parquet` in `folder` atomically and returns its path."""
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist([dict(row) for row in rows], SCHEMA), buffer)
    atomic.write_bytes(folder / TABLE, buffer.getvalue())
    return folder / TABLE


def read_table(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of `path`, a results.parquet or its folder.

    Raises `TrimtabError` when the file is missing, damaged, of another kind, or has no rows.
    """
    file = path / TABLE if path.is_dir() else path
    try:
        with open_parquet(file) as parquet:
            table = parquet.read()
    except (pa.ArrowException, OSError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise TrimtabError(
            f"{file} is damaged or missing ({reason}): `trimtab compare --out {path}` writes it"
        ) from None
    missing = [name for name in _REQUIRED if name not in table.schema.names]
    if missing:
        raise TrimtabError(f"{file} has no column {missing[0]!r}: name the folder of a `trimtab compare`")
    rows = table.to_pylist()
    if not rows:
        raise TrimtabError(f"{file} holds no finished run yet: wait for the first one")
    return rows
