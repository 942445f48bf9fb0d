"""Trains many recipes in worker processes and resumes interrupted runs.

Workers are separate processes because runs must not share the threads and global state of torch. Each worker trains
several runs, one after another. A run is finished if its directory contains a result (`result.json`); a later start
only checks that its settings are the same. `results.parquet` is the table of all results.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.errors import Stopped, TrimtabError
from trimtab.files import parse_json, parse_toml, readable_errors, regular_file
from trimtab.runs import provenance
from trimtab.runs.directory import locked
from trimtab.runs.layout import CONFIG, LOCK, RESULT
from trimtab.runs.summary import RunSummary, write_table
from trimtab.text import differences
from trimtab.trainer.config import Config, parse_config
from trimtab.trainer.lab.experiment import ExperimentPlan, PlannedRun, SkippedRun, plan_from_recipe
from trimtab.trainer.processes import WorkerProcess
from trimtab.trainer.run import build_parts
from trimtab.trainer.stop import Stop

if TYPE_CHECKING:
    from trimtab.trainer.display import RunsDisplay

POLL_INTERVAL = 0.05  # seconds between checks of the workers and of the stop signal
REFUSED = "refused"
FREE_TO_CHANGE = ("out", "description", "trainer.max_idle_steps")


def run_experiment(
    plan: ExperimentPlan, *, workers: int, observer: RunsDisplay, keep: bool = False
) -> dict[str, RunSummary]:
    """Trains all runs of the plan and returns the results by name. Updates `results.parquet` after every run."""
    recipes = {run.name: run.config for run in plan.runs}
    with locked(plan.out):
        save = partial(write_results, plan)
        return train_all(recipes, workers=workers, observer=observer, keep=keep, save=save)


def run_recipe_comparison(config: Config, out: Path, observer: RunsDisplay, *, resume: bool) -> list[Path]:
    """Trains every objective of `[compare]` with every seed and returns their folders, `out/<objective>/seed<k>`.

    Raises `TrimtabError` if `out` is not empty without `resume` or empty with it, or if a run failed or diverged.
    """
    with readable_errors(out):
        has_runs = out.exists() and any(out.iterdir())
    if resume and not has_runs:
        raise TrimtabError(f"{out} holds no comparison: check --out, or start without --resume")
    if has_runs and not resume:
        raise TrimtabError(f"{out} is not empty: continue it with --resume, or choose another --out")
    plan = plan_from_recipe(config, out)
    for run in plan.runs:
        build_parts(run.config).close()
    assert config.compare is not None
    results = run_experiment(plan, workers=config.compare.workers, observer=observer, keep=True)
    for name, result in results.items():
        if result.status != "done":
            raise TrimtabError(f"{name}: {result.error}")
    return [out / name / f"seed{seed}" for name in config.compare.objectives for seed in config.compare.seeds]


def train_all(
    recipes: Mapping[str, Config],
    *,
    workers: int,
    observer: RunsDisplay,
    keep: bool = False,
    save: Callable[[Mapping[str, RunSummary]], object] = lambda _: None,
) -> dict[str, RunSummary]:
    """Trains every recipe into its `out`, `workers` at a time, and returns the results by name in the given order.

    Finished runs are not trained again. A run that fails does not stop the others. With `keep`, checkpoints are kept.
    `save` is called with all results so far, at the start and after every run.

    Raises:
        TrimtabError: a run directory holds a run with other settings; nothing was trained.
        Stopped: after Ctrl-C or SIGTERM; the first signal waits for the current steps and their checkpoints.
    """
    finished = {name: result for name, config in recipes.items() if (result := read_result(config)) is not None}
    save(finished)
    observer.planned(recipes, finished)
    waiting = deque(name for name in recipes if name not in finished)
    pool = [_Worker(_start_process()) for _ in range(min(workers, len(waiting)))]
    stop = Stop()
    try:
        with stop.signals(), stop.finishing():
            while len(finished) < len(recipes):
                if stop.signal_number is not None:
                    for worker in pool:
                        worker.process.process.terminate()
                    for worker in pool:
                        worker.process.process.wait()
                    raise Stopped(stop.signal_number)
                for worker in pool:
                    if not worker.run and waiting:
                        worker.begin(waiting.popleft(), recipes, keep)
                    while worker.run and (news := worker.news()) is not None:
                        if isinstance(news, RunSummary):
                            finished[worker.run] = news
                            save(finished)
                            observer.finished(worker.run, news)
                            worker.run = ""
                        else:
                            observer.progress(worker.run, news)
                time.sleep(POLL_INTERVAL)
    finally:
        for worker in pool:
            worker.process.kill()
    return {name: finished[name] for name in recipes}


@dataclass
class _Worker:
    """A worker process and the name of its current run. If the process dies, the run fails and it is replaced."""

    process: WorkerProcess
    run: str = ""

    def begin(self, run: str, recipes: Mapping[str, Config], keep: bool) -> None:
        self.run = run
        if self.process.process.poll() is not None:
            self.process = _start_process()
        with suppress(OSError):  # the process has ended: `news` reports that
            self.process.send((recipes[run], keep, provenance.command()))

    def news(self) -> int | RunSummary | None:
        """Returns the number of a finished step, the result of the run, or None if there is nothing new."""
        try:
            message = self.process.receive(timeout=0)
        except (EOFError, OSError) as error:
            return RunSummary("failed", f"its process {self.process.exit_reason(error)}")
        return None if message is None else message.content


def _start_process() -> WorkerProcess:
    return WorkerProcess("trimtab.trainer.lab.worker", show_output=True)


def read_result(config: Config) -> RunSummary | None:
    """Returns the summary of a finished run, or None if the run is unfinished or failed: it is then trained again.

    Raises `TrimtabError` if the directory holds files but no run, or a run with other settings (the message names the
    first difference).
    """
    folder = Path(str(config.out))
    _check_settings(folder, config)
    file = folder / RESULT
    try:
        data = parse_json(regular_file(file).read_text(encoding="utf-8"))
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
        # Training would replace these files.
        if folder.is_dir() and any(item.name != LOCK for item in folder.iterdir()):
            raise TrimtabError(f"{folder} holds files but no run ({CONFIG} is missing): choose another --out")
        return
    try:
        saved = parse_config(parse_toml(file.read_text(encoding="utf-8")), str(file))
    except (OSError, ValueError) as error:
        raise TrimtabError(f"{file} cannot be read ({error}): delete {folder}, and it is trained again") from None
    for key, old, new in differences(saved.model_dump(mode="json"), config.model_dump(mode="json")):
        # If the objective is a user function, the run adds its equation to the saved config.
        if key not in FREE_TO_CHANGE and not (key == "objective.equation" and new is None):
            raise TrimtabError(
                f"{folder} was trained with {key} = {old}, now it is {new}: "
                "give the same settings to continue, or choose another --out"
            )


def write_results(plan: ExperimentPlan, results: Mapping[str, RunSummary]) -> Path:
    """Replaces `results.parquet` atomically and returns its path. Runs without a result have no row.

    The column `status` is `done`, `diverged`, `failed`, or `refused` for a method that cannot be trained in its regime;
    such a row has no seed, and `error` is the reason.
    """
    rows = []
    for run in (run for run in plan.runs if run.name in results):
        ours = {"seed": run.seed, "run": run.name, "planned_steps": run.config.trainer.steps}
        rows.append({**_columns(run), **ours, **asdict(results[run.name])})
    rows += [{**_columns(item), "status": REFUSED, "error": item.reason} for item in plan.skipped]
    return write_table(plan.out, rows)


def _columns(item: PlannedRun | SkippedRun) -> dict[str, Any]:
    return {
        "method": item.method.spec,
        "objective": item.method.objective,
        "keywords": " ".join(item.method.overrides),
        "regime": item.regime.name,
        "regime_description": item.regime.description,
    }
