"""Trains many recipes in worker processes and resumes interrupted ones.

Workers are processes of their own (torch's threads and global state stay apart), reused from cell to cell, and talk
JSON lines over pipes. A cell is finished once its directory holds a result; that is all a later start looks at.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
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
from trimtab.lab.experiment import Plan
from trimtab.lab.results import Result, write_results
from trimtab.runs import provenance
from trimtab.training.stop import Stop

LOOK = 0.5  # seconds between looks at a signal that asked to stop


class Watch(Protocol):
    """Who looks on. Calls come from one thread."""

    def planned(self, cells: Mapping[str, Config], done: Mapping[str, Result]) -> None:
        """Once, before anything starts: all cells, and the results that were there already."""
        ...

    def progress(self, name: str, step: int) -> None:
        """A cell finished a step."""
        ...

    def finished(self, name: str, result: Result) -> None:
        """A cell ended, whatever its status."""
        ...


class NullExperimentObserver:
    """Looks away."""

    def planned(self, cells: Mapping[str, Config], done: Mapping[str, Result]) -> None:
        pass

    def progress(self, name: str, step: int) -> None:
        pass

    def finished(self, name: str, result: Result) -> None:
        pass


@dataclass(frozen=True, slots=True)
class _Event:
    """A step of a cell, or its result."""

    name: str
    step: int = 0
    result: Result | None = None


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keeps a second grid out of the folder. `TrimtabError` when one is running there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock")
        lock.acquire(blocking=False)
    except Timeout:
        raise TrimtabError(f"{folder} is in use by another grid: wait for it, or choose another --out") from None
    except OSError as error:
        raise TrimtabError(f"cannot write {folder}: {error.strerror}; choose another --out") from None
    try:
        yield
    finally:
        lock.release()


def run_cells(
    cells: Mapping[str, Config], *, workers: int, watch: Watch | None = None, keep: bool = False
) -> dict[str, Result]:
    """Train every recipe into its own `out`, `workers` at a time; the results by the cell's name, in the given order.

    Finished cells are not trained again. A cell that fails does not stop the others. `keep`: with checkpoints.

    Raises:
        TrimtabError: a finished or unfinished cell was trained with other settings; nothing was trained then.
        Stopped: by Ctrl-C or SIGTERM, of which the first waits for the steps in progress and their checkpoints.
    """
    watcher = watch or NullExperimentObserver()
    known = {name: results.read(config) for name, config in cells.items()}
    found = {name: result for name, result in known.items() if result is not None}
    watcher.planned(cells, found)
    todo = {name: config for name, config in cells.items() if name not in found}
    if todo:
        found |= _train(todo, min(workers, len(todo)), watcher, keep)
    return {name: found[name] for name in cells}


def _train(cells: Mapping[str, Config], workers: int, watch: Watch, keep: bool) -> dict[str, Result]:
    waiting: queue.SimpleQueue[tuple[str, Config]] = queue.SimpleQueue()
    events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
    for item in cells.items():
        waiting.put(item)
    pool = [_Worker(waiting, events, keep) for _ in range(workers)]
    found: dict[str, Result] = {}
    stop = Stop()
    try:
        with stop.signals(), stop.finishing():
            while len(found) < len(cells):
                if stop.asked is not None:
                    _end(pool)
                    raise Stopped(stop.asked)
                with suppress(queue.Empty):
                    event = events.get(timeout=LOOK)
                    if event.result is not None:
                        found[event.name] = event.result
                        watch.finished(event.name, event.result)
                    else:
                        watch.progress(event.name, event.step)
        return found
    finally:
        for worker in pool:
            worker.stop()


def _end(pool: Sequence[_Worker]) -> None:
    """Have every worker end its cell after the step in progress."""
    for worker in pool:
        worker.ask_to_stop()
    for worker in pool:
        worker.wait()


class _Worker:
    """One process and the thread that feeds it; a process that dies fails its cell and is replaced."""

    def __init__(
        self, waiting: queue.SimpleQueue[tuple[str, Config]], events: queue.SimpleQueue[_Event], keep: bool
    ) -> None:
        self._waiting, self._events, self._keep = waiting, events, keep
        self._lock = threading.Lock()
        self._stopped = False
        self._process = _start()
        threading.Thread(target=self._feed, daemon=True).start()

    def ask_to_stop(self) -> None:
        """Let its process end in good order; it takes no further cell."""
        with self._lock:
            self._stopped = True
            self._process.terminate()

    def wait(self) -> None:
        self._process.wait()

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            self._process.kill()
        self._process.wait()

    def _feed(self) -> None:
        while True:
            try:
                name, config = self._waiting.get_nowait()
            except queue.Empty:
                return
            result = self._one(name, config)
            with self._lock:
                if self._stopped:
                    return
                if self._process.poll() is not None:
                    self._process = _start()
            self._events.put(_Event(name, result=result))

    def _one(self, name: str, config: Config) -> Result:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        recipe = config.model_dump(mode="json", exclude_none=True)
        job = {"recipe": recipe, "keep": self._keep, "command": provenance.command()}
        try:
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass  # it died before; the empty answer below says so
        for line in process.stdout:
            answer = json.loads(line)
            if "result" in answer:
                return results.restored(answer["result"])
            self._events.put(_Event(name, step=answer["step"]))
        return Result("failed", f"its process died with exit code {process.wait()}")


def _start() -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "trimtab.lab.worker"]
    # A session of its own: Ctrl-C is this process's to handle.
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)


# What a run of the laboratory model is made of: its start, a held-out evaluation of 128 problems, a response sampled, a
# response in one epoch of updates. Proportions, as seconds of one process alone had them on a development machine.
START, EVALUATION, SAMPLED, TRAINED = 1.0, 0.1, 0.0003, 0.0006


def run_plan(
    plan: Plan, out: Path, *, workers: int, watch: Watch | None = None, keep: bool = False
) -> dict[str, Result]:
    """Train all cells of the plan; `out/results.parquet` is rewritten whenever one ends. Results by the cell's name."""
    cells = {cell.name: cell.config for cell in plan.cells}
    with held(out):
        results = run_cells(
            cells, workers=workers, watch=_Tabled(plan, out, watch or NullExperimentObserver()), keep=keep
        )
        write_results(out, plan, results)
    return results


def cost(config: Config) -> float:
    """How much work a run is, beside other runs of its grid; no machine's seconds."""
    trainer = config.trainer
    evaluations = 2 if not config.eval.every else 1 + -(-trainer.steps // config.eval.every)
    responses = trainer.steps * trainer.prompts * trainer.samples
    return (
        START + EVALUATION * evaluations * config.eval.problems / 128 + responses * (SAMPLED + TRAINED * trainer.epochs)
    )


class _Tabled:
    """Rewrites the table before it tells the watcher."""

    def __init__(self, plan: Plan, out: Path, watch: Watch) -> None:
        self._plan, self._out, self._watch = plan, out, watch
        self._results: dict[str, Result] = {}

    def planned(self, cells: Mapping[str, Config], done: Mapping[str, Result]) -> None:
        self._results = dict(done)
        write_results(self._out, self._plan, self._results)
        self._watch.planned(cells, done)

    def progress(self, name: str, step: int) -> None:
        self._watch.progress(name, step)

    def finished(self, name: str, result: Result) -> None:
        self._results[name] = result
        write_results(self._out, self._plan, self._results)
        self._watch.finished(name, result)
