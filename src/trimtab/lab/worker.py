"""The worker process of an experiment: JSON recipes in, steps and results out, one per line.

It exits with its parent: when its input ends, an unfinished run is left for the next start.
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
from trimtab.lab.results import write
from trimtab.runs import atomic
from trimtab.runs.directory import read_metrics
from trimtab.runs.layout import CONFIG, METRICS, MODEL
from trimtab.runs.summary import RunSummary, Status, summarize
from trimtab.training.observer import NullObserver
from trimtab.training.run import train
from trimtab.training.stop import Stop

TRACEBACK = "error.txt"


class StepReporter(NullObserver):
    """Writes a message for each finished step."""

    def __init__(self, messages: TextIO) -> None:
        self.messages = messages

    def step(self, metrics: Mapping[str, float | str]) -> None:
        print(json.dumps({"step": metrics["step"]}), file=self.messages, flush=True)


def main() -> None:
    # Output of libraries must not be mixed with the messages.
    messages = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    jobs: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read_jobs, args=(jobs,), daemon=True).start()
    while True:
        job = json.loads(jobs.get())
        config, stop = parse_config(job["recipe"], "recipe"), Stop(line=b"")
        try:
            result = run_cell(
                config, keep=job["keep"], observer=StepReporter(messages), command=job["command"], stop=stop
            )
        except Stopped as stopped:  # the run continues from its checkpoint at the next start
            sys.exit(128 + stopped.signal)
        print(json.dumps({"result": asdict(result)}), file=messages, flush=True)
        if stop.asked is not None:  # stopped during the last step: the run is complete
            sys.exit(128 + stop.asked)


def _read_jobs(jobs: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        jobs.put(line)
    os._exit(0)  # the parent has exited


def run_cell(config: Config, *, keep: bool, observer: NullObserver, command: str, stop: Stop) -> RunSummary:
    """Train a run into `config.out`, write its result there and return it.

    `keep` keeps checkpoints and the start model. `command` is the command line of the experiment. `stop` is set by
    SIGTERM. An interrupted run continues from its checkpoint, or starts again if there is none. No error is raised
    except `Stopped`: the result contains the message, and the experiment continues.
    """
    folder, start = Path(str(config.out)), time.perf_counter()
    resume = (folder / "checkpoints").is_dir() and any((folder / "checkpoints").iterdir())
    status: Status = "done"
    error = ""
    try:
        if folder.exists() and not resume:
            shutil.rmtree(folder)
        train(config, resume=resume, observer=observer, stop=stop, command=command)
    except TrimtabError as user_error:
        status, error = ("diverged" if isinstance(user_error, DivergedError) else "failed"), str(user_error)
    except Exception as exception:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / TRACEBACK).write_text(traceback.format_exc())
        status, error = "failed", f"{type(exception).__name__}: {exception} ({folder / TRACEBACK})"
    rows: list[dict[str, Any]] = read_metrics(folder / METRICS) if (folder / METRICS).is_file() else []
    result = summarize(rows, config, status, time.perf_counter() - start, error)
    if not keep and status != "failed":
        for part in ("checkpoints", MODEL):
            shutil.rmtree(folder / part, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / CONFIG).exists():  # removed by a run that ended before its first step
        atomic.write_text(folder / CONFIG, config.dump())
    write(folder, result)
    return result


if __name__ == "__main__":
    main()
