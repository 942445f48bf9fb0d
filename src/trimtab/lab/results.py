"""The summary of one run of an experiment: a few metrics, stored in `result.json` of its run directory."""

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
from trimtab.lab.experiment import ExperimentPlan, PlannedRun
from trimtab.runs import atomic
from trimtab.runs.layout import CONFIG

FILE = "result.json"
Status = Literal["done", "diverged", "failed"]


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The summary of one run; None means not measured.

    status: `done`; `diverged` if training stopped because updates were no longer finite, which is a valid result;
    `failed` for any other error (`error` has the message).
    curve: held-out greedy accuracy by step, step 0 before training. accuracy: its last value, None unless done.
    reward: mean over the last tenth of the steps. k3 .. log_ratio_seq: mismatch at the last step that measured it, and
    its worst value over the run (the lowest ESS). clipped, rejected: mean share of tokens. seconds: wall-clock time
    including start and evaluations.
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
) -> RunSummary:
    """Returns the summary of a run from the rows of its metrics.jsonl, in order."""
    before, curve = _accuracy(rows, config)
    values = [value for _, value in curve]
    mismatch: dict[str, Any] = {}
    for name, key, worst in _MISMATCH:
        series = _series(rows, key)
        mismatch |= {name: series[-1], f"{name}_worst": worst(series)} if series else {}
    rewards = _series(rows, "reward/mean")
    last = rewards[-max(1, len(rewards) // 10) :]
    clipped = [
        sum(row[key] for key in row if key.startswith("clip/") and _finite(row[key]))
        for row in rows
        if any(key.startswith("clip/") for key in row)
    ]
    return RunSummary(
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
        **mismatch,
    )


def _accuracy(rows: Sequence[Mapping[str, Any]], config: Config) -> tuple[float | None, list[tuple[int, float]]]:
    key = f"eval/{config.task.name}/greedy"
    before = rows[0].get(f"eval/{config.task.name}/before") if rows else None
    curve = [] if before is None else [(0, float(before))]
    for index, row in enumerate(rows):
        # In the first row this key holds the value before training, unless step 1 was evaluated.
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


def write(folder: Path, result: RunSummary) -> None:
    """Write result.json atomically; its presence marks a run as finished."""
    atomic.write_text(folder / FILE, json.dumps(asdict(result), allow_nan=False) + "\n")


def read(config: Config) -> RunSummary | None:
    """Reads the summary of a finished run; None if it is not finished or failed, so that it is trained again.

    Raises `TrimtabError` if the directory holds a run with other settings, naming the first that differs.
    """
    folder = Path(str(config.out))
    _check_settings(folder, config)
    try:
        data = json.loads((folder / FILE).read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise TrimtabError(
            f"{folder / FILE} cannot be read ({error}): delete {folder}, and it is trained again"
        ) from None
    if not isinstance(data, dict) or set(data) != {field.name for field in fields(RunSummary)}:
        raise TrimtabError(f"{folder / FILE} is not a result of this version: delete {folder}, and it is trained again")
    result = restored(data)
    return None if result.status == "failed" else result


def restored(data: Mapping[str, Any]) -> RunSummary:
    """Returns the summary from its JSON object."""
    values: dict[str, Any] = dict(data)
    values |= {key: tuple(values[key]) for key in ("curve", "curve_steps")}
    return RunSummary(**values)


def _check_settings(folder: Path, config: Config) -> None:
    file = folder / CONFIG
    if not file.is_file():
        return
    try:
        saved = parse_config(tomllib.loads(file.read_text()), str(file))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise TrimtabError(f"{file} cannot be read ({error}): delete {folder}, and it is trained again") from None
    old, new = _flatten(saved.model_dump(mode="json")), _flatten(config.model_dump(mode="json"))
    for key in sorted(old.keys() | new.keys()):
        # The run adds the equation of an objective that is a user function.
        if key == "objective.equation" and new.get(key) is None:
            continue
        if key not in ("out", "description", "trainer.max_idle_steps") and old.get(key) != new.get(key):
            raise TrimtabError(
                f"{folder} was trained with {key} = {old.get(key)}, now it is {new.get(key)}: "
                "give the same settings to continue, or choose another --out"
            )


def _flatten(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in data.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


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
REFUSED = "refused"


def write_results(folder: Path, plan: ExperimentPlan, results: Mapping[str, RunSummary]) -> Path:
    """Replace `results.parquet` atomically and return its path. Runs without a result have no row.

    The column `status` is `done`, `diverged`, `failed`, or `refused` for a method that is impossible in its regime (no
    seed, the reason in `error`).
    """
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


def _row(cell: PlannedRun, result: RunSummary, folder: Path) -> dict[str, Any]:
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
