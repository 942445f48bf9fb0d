"""Runs a planned experiment: one lock, and a result table that is complete at any moment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from trimtab.config import Config
from trimtab.lab.experiment import Plan
from trimtab.lab.results import Result
from trimtab.lab.runner import Unseen, Watch, held, run_cells
from trimtab.lab.table import write_results

# What a run of the laboratory model is made of: its start, a held-out evaluation of 128 problems, a response sampled, a
# response in one epoch of updates. Proportions, as seconds of one process alone had them on a development machine.
START, EVALUATION, SAMPLED, TRAINED = 1.0, 0.1, 0.0003, 0.0006


def run_plan(
    plan: Plan, out: Path, *, workers: int, watch: Watch | None = None, keep: bool = False
) -> dict[str, Result]:
    """Train all cells of the plan; `out/results.parquet` is rewritten whenever one ends. Results by the cell's name."""
    cells = {cell.name: cell.config for cell in plan.cells}
    with held(out):
        results = run_cells(cells, workers=workers, watch=_Tabled(plan, out, watch or Unseen()), keep=keep)
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
