"""The worker process of an experiment: receives recipes, trains them, and sends steps and results.

It exits when its parent exits; the next start continues an unfinished run.
"""

from __future__ import annotations

import json
import queue
import shutil
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from trimtab.errors import DivergedError, Stopped, TrimtabError
from trimtab.runs import atomic
from trimtab.runs.directory import read_metrics
from trimtab.runs.layout import CHECKPOINTS, CONFIG, METRICS, MODEL, RESULT, TRACEBACK
from trimtab.runs.reader import Run
from trimtab.runs.summary import RunSummary, Status, summarize
from trimtab.trainer.config import Config
from trimtab.trainer.observer import NullObserver
from trimtab.trainer.processes import Message, Parent
from trimtab.trainer.run import train
from trimtab.trainer.stop import Stop


@dataclass
class StepReporter(NullObserver):
    """Sends the number of each finished step to the parent."""

    parent: Parent

    def step(self, metrics: Mapping[str, float | str]) -> None:
        self.parent.send(metrics["step"])


def main() -> None:
    jobs: queue.SimpleQueue[Message] = queue.SimpleQueue()
    parent = Parent(jobs.put)
    while True:
        config, keep, command = jobs.get().content
        stop = Stop(line=b"")
        try:
            result = train_one(config, keep=keep, observer=StepReporter(parent), command=command, stop=stop)
        except Stopped as stopped:  # the next start continues the run from its checkpoint
            sys.exit(128 + stopped.signal)
        parent.send(result)
        if stop.signal_number is not None:  # stopped during the last step: the run is complete
            sys.exit(128 + stop.signal_number)


def train_one(config: Config, *, keep: bool, observer: NullObserver, command: str, stop: Stop) -> RunSummary:
    """Trains a run into `config.out`, writes its result there and returns it.

    With `keep`, checkpoints and the initial model are kept. `command` is the command line of the experiment. SIGTERM
    sets `stop`. An interrupted run continues from its checkpoint, or starts again if there is none. Only `Stopped` is
    raised: other errors are reported in the result, and the experiment continues.
    """
    folder, start, used = Path(str(config.out)), time.perf_counter(), time.process_time()
    resume = (folder / CHECKPOINTS).is_dir() and any((folder / CHECKPOINTS).iterdir())
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
        (folder / TRACEBACK).write_text(traceback.format_exc(), encoding="utf-8")
        status, error = "failed", f"{type(exception).__name__}: {exception} ({folder / TRACEBACK})"
    rows: list[dict[str, Any]] = read_metrics(folder / METRICS) if (folder / METRICS).is_file() else []
    run = Run(folder, config.model_dump(mode="json"), rows)
    result = summarize(run, status, time.perf_counter() - start, error)
    result = replace(result, processor_seconds=time.process_time() - used)
    if not keep and status != "failed":
        for part in (CHECKPOINTS, MODEL):
            if (folder / part).exists():
                atomic.remove_folder(folder / part)  # a kill leaves no half-deleted checkpoint: the run starts again
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / CONFIG).exists():  # a run that ends before its first step removes it
        atomic.write_text(folder / CONFIG, config.dump())
    # This file marks the run as finished.
    atomic.write_text(folder / RESULT, json.dumps(asdict(result), allow_nan=False) + "\n")
    return result


if __name__ == "__main__":
    main()
