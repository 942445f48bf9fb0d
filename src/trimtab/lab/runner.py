"""Trains many recipes in worker processes and resumes interrupted ones.

Workers are separate processes, since threads and global state of torch must not be shared; each trains several runs in
turn. A run is finished if its directory contains a result; a later start checks nothing else.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from filelock import FileLock, Timeout

from trimtab.config import Config
from trimtab.errors import Stopped, TrimtabError
from trimtab.lab import results as results
from trimtab.lab.experiment import ExperimentPlan
from trimtab.lab.results import write_results
from trimtab.processes import WorkerProcess
from trimtab.runs import provenance
from trimtab.runs.summary import RunSummary
from trimtab.training.stop import Stop

POLL_INTERVAL = 0.5  # seconds between checks for a stop signal


class ExperimentObserver(Protocol):
    """Progress callbacks of an experiment, called from one thread."""

    def planned(self, cells: Mapping[str, Config], done: Mapping[str, RunSummary]) -> None:
        """Called once before training with all runs and the results that already exist."""
        ...

    def progress(self, name: str, step: int) -> None:
        """Called when a run has finished a step."""
        ...

    def finished(self, name: str, result: RunSummary) -> None:
        """Called when a run has ended, with any status."""
        ...


class NullExperimentObserver:
    """An observer that does nothing."""

    def planned(self, cells: Mapping[str, Config], done: Mapping[str, RunSummary]) -> None:
        pass

    def progress(self, name: str, step: int) -> None:
        pass

    def finished(self, name: str, result: RunSummary) -> None:
        pass


@dataclass(frozen=True, slots=True)
class _Event:
    """A finished step of a run, or its result."""

    name: str
    step: int = 0
    result: RunSummary | None = None


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Locks the folder for the block. Raises `TrimtabError` if another experiment is running there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock")
        lock.acquire(blocking=False)
    except Timeout:
        raise TrimtabError(f"{folder} is in use by another comparison: wait for it, or choose another --out") from None
    except OSError as error:
        raise TrimtabError(f"cannot write {folder}: {error.strerror}; choose another --out") from None
    try:
        yield
    finally:
        lock.release()


def run_cells(
    cells: Mapping[str, Config], *, workers: int, observer: ExperimentObserver | None = None, keep: bool = False
) -> dict[str, RunSummary]:
    """Train every recipe into its `out`, `workers` at a time, and return the results by name in the given order.

    Finished runs are not trained again. A run that fails does not stop the others. `keep` keeps checkpoints.

    Raises:
        TrimtabError: the directory of a run holds one with other settings; nothing was trained.
        Stopped: by Ctrl-C or SIGTERM; the first signal waits for the current steps and their checkpoints.
    """
    active_observer = observer or NullExperimentObserver()
    existing = {name: results.read(config) for name, config in cells.items()}
    finished = {name: result for name, result in existing.items() if result is not None}
    active_observer.planned(cells, finished)
    remaining = {name: config for name, config in cells.items() if name not in finished}
    if remaining:
        finished |= _train(remaining, min(workers, len(remaining)), active_observer, keep)
    return {name: finished[name] for name in cells}


def _train(
    cells: Mapping[str, Config], workers: int, observer: ExperimentObserver, keep: bool
) -> dict[str, RunSummary]:
    waiting: queue.SimpleQueue[tuple[str, Config]] = queue.SimpleQueue()
    events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
    for item in cells.items():
        waiting.put(item)
    pool = [_Worker(waiting, events, keep) for _ in range(workers)]
    finished: dict[str, RunSummary] = {}
    stop = Stop()
    try:
        with stop.signals(), stop.finishing():
            while len(finished) < len(cells):
                if stop.signal_number is not None:
                    _stop_workers(pool)
                    raise Stopped(stop.signal_number)
                with suppress(queue.Empty):
                    event = events.get(timeout=POLL_INTERVAL)
                    if event.result is not None:
                        finished[event.name] = event.result
                        observer.finished(event.name, event.result)
                    else:
                        observer.progress(event.name, event.step)
        return finished
    finally:
        for worker in pool:
            worker.stop()


def _stop_workers(pool: Sequence[_Worker]) -> None:
    """Make every worker end its run after the current step."""
    for worker in pool:
        worker.request_stop()
    for worker in pool:
        worker.wait()


class _Worker:
    """One process and the thread that sends it jobs; if the process dies, its run fails and it is replaced."""

    def __init__(
        self, waiting: queue.SimpleQueue[tuple[str, Config]], events: queue.SimpleQueue[_Event], keep: bool
    ) -> None:
        self._waiting, self._events, self._keep_runs = waiting, events, keep
        self._lock = threading.Lock()
        self._stopped = False
        self._process = _start_process()
        threading.Thread(target=self._feed, daemon=True).start()

    def request_stop(self) -> None:
        """Terminate the process gracefully; it gets no further job."""
        with self._lock:
            self._stopped = True
            self._process.process.terminate()

    def wait(self) -> None:
        self._process.process.wait()

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            self._process.kill()

    def _feed(self) -> None:
        while True:
            try:
                name, config = self._waiting.get_nowait()
            except queue.Empty:
                return
            result = self._run_job(name, config)
            with self._lock:
                if self._stopped:
                    return
                if self._process.process.poll() is not None:
                    self._process = _start_process()
            self._events.put(_Event(name, result=result))

    def _run_job(self, name: str, config: Config) -> RunSummary:
        try:
            self._process.send((config, self._keep_runs, provenance.command()))
            while True:
                message = self._process.receive()
                assert message is not None, "this worker sends no heartbeats"
                if isinstance(message.content, RunSummary):
                    return message.content
                self._events.put(_Event(name, step=message.content))
        except (EOFError, OSError):
            return RunSummary("failed", f"its process {self._process.exit_reason()}")


def _start_process() -> WorkerProcess:
    return WorkerProcess("trimtab.lab.worker", show_output=True)


# Relative cost of starting a run, of a held-out evaluation of 128 problems, of sampling a response, and of a response
# in one epoch of updates: seconds of a single process with the laboratory model on a development machine.
START_COST, EVALUATION_COST, SAMPLING_COST, TRAINING_COST = 1.0, 0.1, 0.0003, 0.0006


def run_experiment(
    plan: ExperimentPlan, out: Path, *, workers: int, observer: ExperimentObserver | None = None, keep: bool = False
) -> dict[str, RunSummary]:
    """Train all runs of the plan and return the results by name; updates `out/results.parquet` after every run."""
    cells = {run.name: run.config for run in plan.runs}
    with lock_folder(out):
        results = run_cells(
            cells, workers=workers, observer=_TableWriter(plan, out, observer or NullExperimentObserver()), keep=keep
        )
        write_results(out, plan, results)
    return results


def cost(config: Config) -> float:
    """Returns the cost of a run relative to other runs of its experiment."""
    trainer = config.trainer
    evaluations = 2 if not config.eval.every else 1 + -(-trainer.steps // config.eval.every)
    responses = trainer.steps * trainer.prompts * trainer.samples
    return (
        START_COST
        + EVALUATION_COST * evaluations * config.eval.problems / 128
        + responses * (SAMPLING_COST + TRAINING_COST * trainer.epochs)
    )


class _TableWriter:
    """Updates results.parquet before it calls the observer."""

    def __init__(self, plan: ExperimentPlan, out: Path, observer: ExperimentObserver) -> None:
        self._plan, self._out, self._observer = plan, out, observer
        self._results: dict[str, RunSummary] = {}

    def planned(self, cells: Mapping[str, Config], done: Mapping[str, RunSummary]) -> None:
        self._results = dict(done)
        write_results(self._out, self._plan, self._results)
        self._observer.planned(cells, done)

    def progress(self, name: str, step: int) -> None:
        self._observer.progress(name, step)

    def finished(self, name: str, result: RunSummary) -> None:
        self._results[name] = result
        write_results(self._out, self._plan, self._results)
        self._observer.finished(name, result)
