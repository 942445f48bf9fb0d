"""Objectives x seeds of one recipe, spread over worker processes, drawn side by side.

Workers are processes of their own (torch's threads and global state stay apart) and talk JSON lines over pipes.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.config import COMPANIONS, Config, check_config
from trimtab.errors import TrimtabError
from trimtab.training.observer import Observer
from trimtab.training.run import check


@dataclass(frozen=True, slots=True)
class GridResult:
    """`metrics` maps `<objective>/seed<k>` to the metrics of that run's last step; `runs` to its directory."""

    run: Path
    runs: dict[str, list[Path]]
    metrics: dict[str, Any]


def run_grid(config: Config, out: Path, observer: Observer) -> GridResult:
    """Train every objective of `[compare]` with every seed into `out/<objective>/seed<k>`.

    Raises `TrimtabError` when `out` already holds something or when a run fails.
    """
    if out.exists() and any(out.iterdir()):
        raise TrimtabError(f"{out} is not empty: choose another --out")
    cells = _cells(config, out)
    for cell in cells.values():
        check(cell)
    assert config.compare is not None
    observer.started(config, " | ".join(config.compare.objectives), len(cells), out)
    metrics = run_cells(cells, config.compare.workers, observer)
    runs = {name: [out / name / f"seed{seed}" for seed in config.compare.seeds] for name in config.compare.objectives}
    return GridResult(out, runs, metrics)


def _cells(config: Config, out: Path) -> dict[str, Config]:
    """One checked recipe for each objective and seed; what belongs to the recipe's own objective stays with it."""
    assert config.compare is not None
    cells = {}
    for name in config.compare.objectives:
        for seed in config.compare.seeds:
            data = _for_objective(config, name) | {"seed": seed, "out": str(out / name / f"seed{seed}")}
            cells[f"{name}/seed{seed}"] = check_config(data, f"{name}, seed {seed}")
    return cells


def _for_objective(config: Config, name: str) -> dict[str, Any]:
    """The recipe with another objective: without keywords that one does not know, the section only the first could use,
    and an advantage made for the first alone. Whatever else does not fit is refused by `check`, not dropped."""
    from trimtab.objectives import objective

    data = config.model_dump(exclude={"compare"}, exclude_none=True)
    if name == config.objective.name:
        return data
    own = COMPANIONS.get(config.objective.name)
    if own is not None and own != COMPANIONS.get(name):
        data.pop(own, None)
    if objective(name).advantage != objective(config.objective.name).advantage:
        data.pop("advantage", None)
    return data | {"objective": {"name": name, **_shared(name, config.objective.keywords)}}


def _shared(name: str, keywords: Mapping[str, Any]) -> dict[str, Any]:
    from trimtab.objectives import keywords_of

    return {key: value for key, value in keywords.items() if key in keywords_of(name)}


def run_cells(cells: Mapping[str, Config], workers: int, observer: Observer) -> dict[str, Any]:
    """Train every recipe of `cells` into its own `out`, `workers` at a time; the last metrics by the cell's name.

    Raises `TrimtabError` naming the cell whose run failed; the others are stopped.
    """
    waiting: queue.SimpleQueue[tuple[str, Config]] = queue.SimpleQueue()
    events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    for item in cells.items():
        waiting.put(item)
    processes = [_start() for _ in range(min(workers, len(cells)))]
    threads = [threading.Thread(target=_feed, args=(p, waiting, events), daemon=True) for p in processes]
    try:
        for thread in threads:
            thread.start()
        return _gather(events, len(cells), observer)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _gather(events: queue.SimpleQueue[dict[str, Any]], cells: int, observer: Observer) -> dict[str, Any]:
    metrics: dict[str, Any] = {}
    while len(metrics) < cells:
        event = events.get()
        if "error" in event:
            raise TrimtabError(f"{event['cell']}: {event['error']}")
        metrics[event["cell"]] = event["metrics"]
        observer.phase("runs", len(metrics), cells)
        observer.message(f"{event['cell']}: {_summary(event['metrics'])}")
    return metrics


def _summary(metrics: Mapping[str, Any]) -> str:
    held_out = [f"held-out {value:.2f}" for key, value in metrics.items() if key.endswith("/greedy")]
    return ", ".join([f"reward {metrics.get('reward/mean', float('nan')):.2f}", *held_out])


def _start() -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "trimtab.lab.worker"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _feed(
    process: subprocess.Popen[str],
    waiting: queue.SimpleQueue[tuple[str, Config]],
    events: queue.SimpleQueue[dict[str, Any]],
) -> None:
    """Hand cells to one worker until none is left; a worker that dies fails its cell."""
    assert process.stdin is not None
    assert process.stdout is not None
    while True:
        try:
            name, config = waiting.get_nowait()
        except queue.Empty:
            return
        process.stdin.write(json.dumps(config.model_dump(mode="json", exclude_none=True)) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        if not answer:
            events.put({"cell": name, "error": f"its process died with exit code {process.wait()}"})
            return
        events.put({"cell": name, **json.loads(answer)})
