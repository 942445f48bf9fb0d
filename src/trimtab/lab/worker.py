"""The worker process of an experiment: JSON recipes in, steps and results out, one per line.

It dies with its parent: when its input ends, an unfinished cell is left for the next start.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from trimtab.config import Config, parse_config
from trimtab.errors import DivergedError, Stopped, TrimtabError
from trimtab.lab.results import Result, Status, summarize, write
from trimtab.runs import atomic
from trimtab.runs.directory import read_metrics
from trimtab.runs.layout import CONFIG, METRICS, MODEL
from trimtab.training.observer import NullObserver
from trimtab.training.run import train
from trimtab.training.stop import Stop

TRACEBACK = "error.txt"


class Steps(NullObserver):
    """Says how far the run is."""

    def __init__(self, answers: TextIO) -> None:
        self.answers = answers

    def step(self, metrics: Mapping[str, float | str]) -> None:
        print(json.dumps({"step": metrics["step"]}), file=self.answers, flush=True)


def main() -> None:
    # Whatever a library prints must not land between the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    jobs: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(jobs,), daemon=True).start()
    while True:
        job = json.loads(jobs.get())
        config, stop = parse_config(job["recipe"], "recipe"), Stop(line=b"")
        try:
            result = run_cell(config, keep=job["keep"], observer=Steps(answers), command=job["command"], stop=stop)
        except Stopped as stopped:  # the grid is stopped; the cell goes on from its checkpoint another time
            sys.exit(128 + stopped.signal)
        print(json.dumps({"result": asdict(result)}), file=answers, flush=True)
        if stop.asked is not None:  # during the cell's last step: it is whole, and there is no next one
            sys.exit(128 + stop.asked)


def _listen(jobs: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        jobs.put(line)
    os._exit(0)  # the parent is gone; a run in progress must not go on unseen


def run_cell(config: Config, *, keep: bool, observer: NullObserver, command: str, stop: Stop) -> Result:
    """Train a cell into `config.out` and leave its result there. `keep`: with checkpoints and the start model;
    `command`: what the grid was started with; `stop`: what SIGTERM sets.

    A cell that was cut short goes on from its checkpoint, or starts again where there is none. Nothing that goes wrong
    inside is raised: a grid goes on, and the result says what happened. Except `Stopped`, after SIGTERM.
    """
    folder, start = Path(str(config.out)), time.perf_counter()
    resume = (folder / "checkpoints").is_dir() and any((folder / "checkpoints").iterdir())
    status: Status = "done"
    error = ""
    try:
        if folder.exists() and not resume:
            shutil.rmtree(folder)
        train(config, resume=resume, observer=observer, stop=stop, command=command)
    except TrimtabError as failure:
        status, error = ("diverged" if isinstance(failure, DivergedError) else "failed"), str(failure)
    except Exception as bug:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / TRACEBACK).write_text(traceback.format_exc())
        status, error = "failed", f"{type(bug).__name__}: {bug} ({folder / TRACEBACK})"
    rows: list[dict[str, Any]] = read_metrics(folder / METRICS) if (folder / METRICS).is_file() else []
    result = summarize(rows, config, status, time.perf_counter() - start, error)
    if not keep and status != "failed":
        for part in ("checkpoints", MODEL):
            shutil.rmtree(folder / part, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / CONFIG).exists():  # a run that ended before its first step takes its recipe back
        atomic.write_text(folder / CONFIG, config.dump())
    write(folder, result)
    return result


if __name__ == "__main__":
    main()
