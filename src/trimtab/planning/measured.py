"""Reads the phase times of a synchronous run, from which an asynchronous run is predicted."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.config import parse_config
from trimtab.errors import TrimtabError
from trimtab.planning.pipeline_schedule import Phases
from trimtab.runs.layout import CONFIG

# Share of the steps left out at the start, where a run compiles, allocates and fills caches.
_WARMUP_SHARE = 0.2
_PHASE_KEYS = ("time/collect", "time/score", "time/proximal", "time/update", "time/publish", "time/step")


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """Medians over the steps of a run: seconds by phase and tokens per step; and the number of updates per step."""

    phases: Phases
    steps: int
    updates: int
    generated: float
    trained: float


def read_phases(run: Path) -> MeasuredRun:
    """Reads the phases of a run without overlap; the unaccounted time of a step is attributed to the trainer.

    Raises `TrimtabError` if the run does not exist, is not synchronous, or has too few steps.
    """
    from trimtab.runs.reader import read_config, read_steps  # imported here: needs pyarrow

    config = parse_config(read_config(run), str(run / CONFIG))
    if config.trainer.max_lag:
        raise TrimtabError(
            f"{run} ran with trainer.max_lag = {config.trainer.max_lag}, where waiting hides what a phase takes: "
            "predict from a run without max_lag"
        )
    rows = [row for row in read_steps(run) if all(row.get(key) is not None for key in _PHASE_KEYS)]
    rows = rows[int(len(rows) * _WARMUP_SHARE) :]
    if len(rows) < 3:
        raise TrimtabError(f"{run} has {len(rows)} steps to measure after the first: let it run for 5 or more")
    return MeasuredRun(
        _phases(rows),
        steps=len(rows),
        updates=config.trainer.updates_per_step,
        generated=_median(rows, "tokens/rollout"),
        trained=_median(rows, "tokens/train"),
    )


def _phases(rows: Sequence[Mapping[str, Any]]) -> Phases:
    generate, score, proximal, update, publish, step = (_median(rows, key) for key in _PHASE_KEYS)
    unaccounted = max(0.0, step - generate - score - proximal - update - publish)
    return Phases(generate=generate, train=proximal + update + unaccounted, score=score, publish=publish)


def _median(rows: Sequence[Mapping[str, Any]], key: str) -> float:
    return statistics.median(float(row[key]) for row in rows)
