"""The files of an experiment's runs: `result.json` of each finished run, and the table of all of them."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from trimtab.errors import TrimtabError
from trimtab.files import parse_json, parse_toml, regular_file
from trimtab.runs import atomic
from trimtab.runs.dotted_keys import differences
from trimtab.runs.layout import CONFIG
from trimtab.runs.summary import RunSummary, write_table
from trimtab.trainer.config import Config, parse_config
from trimtab.trainer.lab.experiment import ExperimentPlan, PlannedRun, SkippedRun

FILE = "result.json"
REFUSED = "refused"
FREE_TO_CHANGE = ("out", "description", "trainer.max_idle_steps")


def write(folder: Path, result: RunSummary) -> None:
    """Writes result.json atomically; its presence marks a run as finished."""
    atomic.write_text(folder / FILE, json.dumps(asdict(result), allow_nan=False) + "\n")


def read(config: Config) -> RunSummary | None:
    """Reads the summary of a finished run; None if it is not finished or failed, so that it is trained again.

    Raises `TrimtabError` if the directory holds a run with other settings, naming the first that differs.
    """
    folder = Path(str(config.out))
    _check_settings(folder, config)
    file = folder / FILE
    try:
        data = parse_json(regular_file(file).read_text())
        if not isinstance(data, dict) or set(data) != {field.name for field in fields(RunSummary)}:
            raise ValueError("it is not a result of this version")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise TrimtabError(f"{file} cannot be read ({error}): delete {folder}, and it is trained again") from None
    data |= {key: tuple(data[key]) for key in ("curve", "curve_steps")}
    return None if data["status"] == "failed" else RunSummary(**data)


def _check_settings(folder: Path, config: Config) -> None:
    file = folder / CONFIG
    if not file.is_file():
        return
    try:
        saved = parse_config(parse_toml(file.read_text()), str(file))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise TrimtabError(f"{file} cannot be read ({error}): delete {folder}, and it is trained again") from None
    for key, old, new in differences(saved.model_dump(mode="json"), config.model_dump(mode="json")):
        # The run adds the equation of an objective that is a user function.
        if key not in FREE_TO_CHANGE and not (key == "objective.equation" and new is None):
            raise TrimtabError(
                f"{folder} was trained with {key} = {old}, now it is {new}: "
                "give the same settings to continue, or choose another --out"
            )


def write_results(folder: Path, plan: ExperimentPlan, results: Mapping[str, RunSummary]) -> Path:
    """Replaces `results.parquet` atomically and returns its path. Runs without a result have no row.

    The column `status` is `done`, `diverged`, `failed`, or `refused` for a method that is impossible in its regime (no
    seed, the reason in `error`).
    """
    rows = [
        {
            **_cell(run),
            "seed": run.seed,
            "run": run.name,
            "planned_steps": run.config.trainer.steps,
            **asdict(results[run.name]),
        }
        for run in plan.runs
        if run.name in results
    ]
    rows += [{**_cell(item), "status": REFUSED, "error": item.reason} for item in plan.skipped]
    return write_table(folder, rows)


def _cell(item: PlannedRun | SkippedRun) -> dict[str, Any]:
    return {
        "method": item.method.spec,
        "objective": item.method.objective,
        "keywords": " ".join(item.method.overrides),
        "regime": item.regime.name,
        "regime_description": item.regime.description,
    }
