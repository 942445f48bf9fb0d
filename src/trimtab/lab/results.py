"""The summary of one run of an experiment: a few metrics, in `result.json` of its directory."""

from __future__ import annotations

import io
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from trimtab.config import Config, parse_config
from trimtab.errors import TrimtabError
from trimtab.lab.experiment import Plan, PlannedRun
from trimtab.runs import atomic
from trimtab.runs.layout import CONFIG

FILE = "result.json"
Status = Literal["done", "diverged", "failed"]


@dataclass(frozen=True, slots=True)
class Result:
    """`status`: `done`; `diverged`, when training stopped because updates were no longer finite, which is a finding;
    `failed`, when something else went wrong (`error` says what).

    curve: held-out greedy accuracy at steps, step 0 before training. `accuracy` is the last of it, None unless done.
    reward: mean over the last tenth of the steps. k3 .. log_ratio_seq: mismatch at the last step that measured it, and
    its worst over the run (ESS: the lowest). clipped, rejected: mean share of tokens. seconds: wall clock, evaluations
    and start included. None: not measured.
    """

    status: Status
    error: str = ""
    steps: int = 0
    updates: int = 0
    seconds: float = 0.0
    accuracy_before: float | None = None
    accuracy: float | None = None
    accuracy_best: float | None = None
    curve_steps: tuple[int, ...] = ()
    curve: tuple[float, ...] = ()
    reward: float | None = None
    k3: float | None = None
    k3_worst: float | None = None
    chi2: float | None = None
    chi2_worst: float | None = None
    ess: float | None = None
    ess_worst: float | None = None
    log_ratio_seq: float | None = None
    log_ratio_seq_worst: float | None = None
    grad_norm_max: float | None = None
    clipped: float | None = None
    rejected: float | None = None
    skipped: int = 0


_MISMATCH = (
    ("k3", "mismatch/k3", max),
    ("chi2", "mismatch/chi2_token", max),
    ("ess", "mismatch/ess_token", min),
    ("log_ratio_seq", "mismatch/log_ratio_seq_max", max),
)


def summarize(
    rows: Sequence[Mapping[str, Any]], config: Config, status: Status, seconds: float, error: str = ""
) -> Result:
    """The result of a run from the rows of its metrics.jsonl, in order."""
    before, curve = _accuracy(rows, config)
    values = [value for _, value in curve]
    found: dict[str, Any] = {}
    for name, key, worst in _MISMATCH:
        series = _series(rows, key)
        found |= {name: series[-1], f"{name}_worst": worst(series)} if series else {}
    rewards = _series(rows, "reward/mean")
    last = rewards[-max(1, len(rewards) // 10) :]
    clipped = [
        sum(row[key] for key in row if key.startswith("clip/") and _finite(row[key]))
        for row in rows
        if any(key.startswith("clip/") for key in row)
    ]
    return Result(
        status=status,
        error=error,
        steps=len(rows),
        updates=int(rows[-1].get("updates", 0)) if rows else 0,
        seconds=seconds,
        accuracy_before=before,
        accuracy=values[-1] if values and status == "done" else None,
        accuracy_best=max(values, default=None),
        curve_steps=tuple(step for step, _ in curve),
        curve=tuple(values),
        reward=_mean(last),
        grad_norm_max=max(_series(rows, "optim/grad_norm"), default=None),
        clipped=_mean(clipped),
        rejected=_mean(_series(rows, "reject/tokens")),
        skipped=int(sum(_series(rows, "optim/skipped"))),
        **found,
    )


def _accuracy(rows: Sequence[Mapping[str, Any]], config: Config) -> tuple[float | None, list[tuple[int, float]]]:
    key = f"eval/{config.task.name}/greedy"
    before = rows[0].get(f"eval/{config.task.name}/before") if rows else None
    curve = [] if before is None else [(0, float(before))]
    for index, row in enumerate(rows):
        # The first row carries the value before training under this key, unless step 1 itself was evaluated.
        measured = index > 0 or before is None or config.eval.every == 1 or config.trainer.steps == 1
        if measured and _finite(row.get(key)):
            curve.append((int(row["step"]), float(row[key])))
    return before, curve


def _series(rows: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [float(row[key]) for row in rows if _finite(row.get(key))]


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def write(folder: Path, result: Result) -> None:
    """Kept whole or not at all: this file is what makes a cell finished."""
    atomic.write_text(folder / FILE, json.dumps(asdict(result), allow_nan=False) + "\n")


def read(config: Config) -> Result | None:
    """The result of a cell that was trained before, None when it is still to do (a failed one is tried again).

    Raises `TrimtabError` when the directory holds a run with other settings, naming the first that differs.
    """
    folder = Path(str(config.out))
    _same_settings(folder, config)
    try:
        data = json.loads((folder / FILE).read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise TrimtabError(
            f"{folder / FILE} cannot be read ({error}): delete {folder}, and it is trained again"
        ) from None
    if not isinstance(data, dict) or set(data) != {field.name for field in fields(Result)}:
        raise TrimtabError(f"{folder / FILE} is not a result of this version: delete {folder}, and it is trained again")
    result = restored(data)
    return None if result.status == "failed" else result


def restored(data: Mapping[str, Any]) -> Result:
    """A result that went through JSON."""
    values: dict[str, Any] = dict(data)
    values |= {key: tuple(values[key]) for key in ("curve", "curve_steps")}
    return Result(**values)


def _same_settings(folder: Path, config: Config) -> None:
    file = folder / CONFIG
    if not file.is_file():
        return
    try:
        known = parse_config(tomllib.loads(file.read_text()), str(file))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise TrimtabError(f"{file} cannot be read ({error}): delete {folder}, and it is trained again") from None
    old, new = _flat(known.model_dump(mode="json")), _flat(config.model_dump(mode="json"))
    for key in sorted(old.keys() | new.keys()):
        # The run adds the equation of an objective that is a user's own function.
        if key == "objective.equation" and new.get(key) is None:
            continue
        if key not in ("out", "description", "trainer.max_idle_steps") and old.get(key) != new.get(key):
            raise TrimtabError(
                f"{folder} was trained with {key} = {old.get(key)}, now it is {new.get(key)}: "
                "give the same settings to go on, or choose another --out"
            )


def _flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in data.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


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
    atomic.write_bytes(folder / TABLE, buffer.getvalue())
    return folder / TABLE


def _row(cell: PlannedRun, result: Result, folder: Path) -> dict[str, Any]:
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
