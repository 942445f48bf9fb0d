"""Predicts an asynchronous run from the phase times of a synchronous one."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trimtab.errors import TrimtabError
from trimtab.runs.layout import CONFIG
from trimtab.trainer.config import parse_config
from trimtab.trainer.planning.estimates import Phases, steady_cycle
from trimtab.trainer.planning.planner import lag, steps_ahead

# Share of the steps left out at the start, where a run compiles, allocates and fills caches.
_WARMUP_SHARE = 0.2
_PHASE_KEYS = ("time/collect", "time/score", "time/proximal", "time/update", "time/publish", "time/step")


def predict_from_run(run: Path, max_lag: int | None) -> dict[str, Any]:
    """Returns the medians of a run without overlap, and what `max_lag` (None: the smallest sufficient one) gives.

    The unaccounted time of a step is attributed to the trainer. Raises `TrimtabError` if the run does not exist, is not
    synchronous, or has too few steps.
    """
    from trimtab.runs.reader import read_config, read_steps  # imported here: needs pyarrow

    trainer = parse_config(read_config(run), str(run / CONFIG)).trainer
    if trainer.max_lag:
        raise TrimtabError(
            f"{run} ran with trainer.max_lag = {trainer.max_lag}, where waiting hides what a phase takes: "
            "predict from a run without max_lag"
        )
    rows = [row for row in read_steps(run) if all(row.get(key) is not None for key in _PHASE_KEYS)]
    rows = rows[int(len(rows) * _WARMUP_SHARE) :]
    if len(rows) < 3:
        raise TrimtabError(f"{run} has {len(rows)} steps to measure after the first: let it run for 5 or more")
    generate, score, proximal, update, publish, step, generated, trained = (
        statistics.median(float(row[key]) for row in rows) for key in (*_PHASE_KEYS, "tokens/rollout", "tokens/train")
    )
    unaccounted = max(0.0, step - generate - score - proximal - update - publish)
    phases = Phases(generate, train=proximal + update + unaccounted, score=score, publish=publish)
    ahead = steps_ahead(max_lag, trainer.updates_per_step, phases)
    steady = steady_cycle(phases, ahead)
    return {
        "measured": {**asdict(phases), "step": phases.in_turn, "steps": len(rows)},
        "tokens_per_second": {
            "generate": generated / max(phases.generate, 1e-9),
            "train": trained / max(phases.train, 1e-9),
        },
        "predicted": {"step": steady.seconds, "engines_busy": steady.engines, "trainer_busy": steady.trainer},
        "lag": lag(steady, trainer.updates_per_step, ahead),
        "recipe": {"trainer.max_lag": ahead * trainer.updates_per_step},
    }
