"""Shared by the laboratory experiments: train many recipes side by side, evaluate what came out, and pick up where a
stopped run left off (finished runs and evaluations are kept)."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.config import Config, load_config
from trimtab.diagnostics.read import read_run
from trimtab.training.observer import Silent

DONE = "evaluation.json"


@dataclass(frozen=True)
class Cell:
    """One run: a recipe with overrides."""

    name: str
    recipe: str
    overrides: tuple[str, ...]

    def config(self, root: Path) -> Config:
        return load_config(self.recipe, [*self.overrides, f"out={root / self.name}"])


class Watch(Silent):
    """One line for each finished run."""

    def message(self, text: str) -> None:
        print(text, flush=True)


def run(cells: Sequence[Cell], root: Path, *, workers: int, samples: int, problems: int) -> dict[str, dict[str, Any]]:
    """Train and evaluate all cells under `root`; the evaluations by name.

    An evaluation holds the greedy accuracy of the run (`greedy`), its curve over steps, and `pass`: k -> pass@k from
    `samples` samples at temperature 1 for each of the first `problems` held-out problems (none for `samples` = 0).
    """
    from trimtab.lab.grid import run_cells

    todo: dict[str, Config] = {}
    for cell in cells:
        folder = root / cell.name
        if not (folder / "report.done").exists():
            shutil.rmtree(folder, ignore_errors=True)  # a run that was cut short starts again
            todo[cell.name] = cell.config(root)
    if todo:
        run_cells(todo, workers, _Finished(root))
    waiting = [cell.name for cell in cells if not (root / cell.name / DONE).exists()]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for name in pool.map(_evaluate, [(root / name, samples, problems) for name in waiting]):
            print(f"evaluated {name}", flush=True)
    return {cell.name: json.loads((root / cell.name / DONE).read_text()) for cell in cells}


class _Finished(Watch):
    def __init__(self, root: Path) -> None:
        self.root = root

    def message(self, text: str) -> None:
        super().message(text)
        (self.root / text.partition(":")[0] / "report.done").touch()


def _evaluate(job: tuple[Path, int, int]) -> str:
    import torch

    from trimtab import evaluation
    from trimtab.training.export import export

    torch.set_num_threads(1)
    folder, samples, problems = job
    read = read_run(folder)
    task = read.config["task"]["name"]
    found = read.accuracy()[task]
    result: dict[str, Any] = {"greedy": found.after, "steps": found.steps.tolist(), "curve": found.values.tolist()}
    if samples:
        with tempfile.TemporaryDirectory() as scratch:
            model = export(folder, Path(scratch) / "model", "last")
            measured = evaluation.run(str(model), task, problems=problems, samples=samples, dtype="float32")
        result["pass"] = {str(k): measured.pass_at(k) for k in measured.pass_ks}
    (folder / DONE).write_text(json.dumps(result))
    return folder.name


def mean_and_range(values: Sequence[float]) -> str:
    """`mean [lowest, highest]` over seeds: with three seeds the range says more than an interval would."""
    data = np.array(values, dtype=float)
    return f"{data.mean():.3f} [{data.min():.3f}, {data.max():.3f}]"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def by_seed(results: Mapping[str, dict[str, Any]], names: Sequence[str], key: str = "greedy") -> list[float]:
    return [results[name][key] for name in names]
