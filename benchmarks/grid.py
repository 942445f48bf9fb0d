"""Shared by the laboratory experiments: train many recipes side by side, evaluate what came out, and pick up where a
stopped run left off (finished runs and evaluations are kept)."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.errors import TrimtabError
from trimtab.runs import trajectories
from trimtab.runs.directory import locked
from trimtab.trainer.config import Config, load_config
from trimtab.trainer.display import RunsDisplay, open_display
from trimtab.trainer.lab.runner import train_all

PASSES = "pass.json"


@dataclass(frozen=True)
class Cell:
    """One run: a recipe with overrides."""

    name: str
    recipe: str
    overrides: tuple[str, ...]

    def config(self, root: Path) -> Config:
        return load_config(self.recipe, [*self.overrides, f"out={root / self.name}"])


def run(cells: Sequence[Cell], root: Path, *, workers: int, samples: int, problems: int) -> dict[str, dict[str, Any]]:
    """Train and evaluate all cells under `root`; the evaluations by name.

    An evaluation holds the greedy accuracy of the run (`greedy`), its curve over steps, and `pass`: k -> pass@k from
    `samples` samples at temperature 1 for each of the first `problems` held-out problems (none for `samples` = 0).
    """
    configs = {cell.name: cell.config(root) for cell in cells}
    with locked(root), open_display(RunsDisplay) as observer:
        results = train_all(configs, workers=workers, observer=observer, keep=samples > 0)
    failed = {name: result.error for name, result in results.items() if result.status != "done"}
    if failed:
        raise TrimtabError("; ".join(f"{name}: {error}" for name, error in failed.items()))
    actual: dict[str, dict[str, Any]] = {
        name: {"greedy": result.accuracy, "steps": result.curve_steps, "curve": result.curve}
        for name, result in results.items()
    }
    if samples:
        waiting = [name for name in configs if not (root / name / PASSES).exists()]
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            for name in pool.map(_evaluate, [(root / name, configs[name], samples, problems) for name in waiting]):
                print(f"evaluated {name}", flush=True)
        for name, evaluation in actual.items():
            evaluation["pass"] = json.loads((root / name / PASSES).read_text())
    return actual


def _evaluate(job: tuple[Path, Config, int, int]) -> str:
    import torch

    from trimtab.trainer import evaluation
    from trimtab.trainer.export import export

    torch.set_num_threads(1)
    folder, config, samples, problems = job
    with tempfile.TemporaryDirectory() as scratch:
        model = export(folder, Path(scratch) / "model", "last")
        settings = evaluation.Settings(samples, problems=problems, dtype="float32")
        [measured] = evaluation.compare([str(model)], [config.task.name], settings).measured.values()
    (folder / PASSES).write_text(json.dumps({str(k): one.value for k, one in measured.pass_estimates.items()}))
    return folder.name


def log_ratios(files: Iterable[Path]) -> Iterator[np.ndarray]:
    """Yields the log-probs of the trainer minus the sampler's, of each stored response that the trainer scored."""
    for row in (row for file in files for row in trajectories.read(file)):
        trainer = row.logp_current if row.logp_proximal is None else row.logp_proximal
        if trainer is not None:
            yield (trainer - row.trajectory.completion.logp_behavior).astype(np.float64)


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
