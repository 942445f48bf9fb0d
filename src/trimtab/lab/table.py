"""Results of an experiment as one parquet file: a row per run, skipped ones included."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from trimtab.lab.experiment import Cell, Plan
from trimtab.lab.results import Result
from trimtab.runs import atomic

FILE = "results.parquet"
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
        *((field.name, _TYPES[str(field.type)]) for field in fields(Result)),
    ]
)
REFUSED = "refused"


def write_results(folder: Path, plan: Plan, results: Mapping[str, Result]) -> Path:
    """Replace `results.parquet` in one step. Cells without a result yet have no row; `status` is `done`, `diverged`,
    `failed`, or `refused` for a method that is impossible in its regime (no seed, `error` says why)."""
    rows = [_row(cell, results[cell.name], folder) for cell in plan.cells if cell.name in results]
    rows += [
        {
            "method": item.method.spec,
            "objective": item.method.objective,
            "keywords": " ".join(item.method.overrides),
            "regime": item.regime.name,
            "regime_description": item.regime.description,
            "status": REFUSED,
            "error": item.reason,
        }
        for item in plan.refused
    ]
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), buffer)
    atomic.write_bytes(folder / FILE, buffer.getvalue())
    return folder / FILE


def _row(cell: Cell, result: Result, folder: Path) -> dict[str, Any]:
    return {
        "method": cell.method.spec,
        "objective": cell.method.objective,
        "keywords": " ".join(cell.method.overrides),
        "regime": cell.regime.name,
        "regime_description": cell.regime.description,
        "seed": cell.seed,
        "run": str(Path(str(cell.config.out)).relative_to(folder)),
        "planned_steps": cell.config.trainer.steps,
        **asdict(result),
    }
