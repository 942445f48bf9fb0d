"""Objectives x seeds of one recipe, as its `[compare]` section asks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.config import REQUIRED_SECTIONS, Config, parse_config
from trimtab.errors import TrimtabError
from trimtab.lab.results import Result
from trimtab.lab.runner import NullExperimentObserver, held, run_cells
from trimtab.runs.directory import read_metrics
from trimtab.runs.layout import METRICS
from trimtab.training.observer import Observer
from trimtab.training.run import check


@dataclass(frozen=True, slots=True)
class GridResult:
    """`metrics` maps `<objective>/seed<k>` to the metrics of that run's last step; `runs` to its directory."""

    run: Path
    runs: dict[str, list[Path]]
    metrics: dict[str, Any]


def run_grid(config: Config, out: Path, observer: Observer, *, resume: bool = False) -> GridResult:
    """Train every objective of `[compare]` with every seed into `out/<objective>/seed<k>`.

    Raises `TrimtabError` when `out` holds something and `resume` is off, when it is empty and `resume` is on, or when a
    run failed or diverged.
    """
    begun = out.exists() and any(out.iterdir())
    if resume and not begun:
        raise TrimtabError(f"{out} holds no comparison: check --out, or start without --resume")
    if begun and not resume:
        raise TrimtabError(f"{out} is not empty: continue it with --resume, or choose another --out")
    cells = _cells(config, out)
    for cell in cells.values():
        check(cell).scorer.close()
    assert config.compare is not None
    observer.started(config, " | ".join(config.compare.objectives), len(cells), out)
    with held(out):
        results = run_cells(cells, workers=config.compare.workers, watch=_Told(observer), keep=True)
    for name, result in results.items():
        if result.status != "done":
            raise TrimtabError(f"{name}: {result.error}")
    metrics = {name: read_metrics(Path(str(cell.out)) / METRICS)[-1] for name, cell in cells.items()}
    runs = {name: [out / name / f"seed{seed}" for seed in config.compare.seeds] for name in config.compare.objectives}
    return GridResult(out, runs, metrics)


class _Told(NullExperimentObserver):
    """Passes on to a run's observer how many runs are done."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._total = self._done = 0

    def planned(self, cells: Mapping[str, Config], done: Mapping[str, Result]) -> None:
        self._total, self._done = len(cells), len(done)

    def finished(self, name: str, result: Result) -> None:
        self._done += 1
        self._observer.phase("runs", self._done, self._total)
        self._observer.message(f"{name}: {in_words(result)}")


def in_words(result: Result) -> str:
    """A result in one line."""
    if result.status != "done":
        return f"{result.status}: {result.error}"
    reward = [] if result.reward is None else [f"reward {result.reward:.2f}"]
    return ", ".join([*reward, *([] if result.accuracy is None else [f"held-out {result.accuracy:.2f}"])])


def _cells(config: Config, out: Path) -> dict[str, Config]:
    """One checked recipe for each objective and seed; what belongs to the recipe's own objective stays with it."""
    assert config.compare is not None
    cells = {}
    for name in config.compare.objectives:
        for seed in config.compare.seeds:
            data = _for_objective(config, name) | {"seed": seed, "out": str(out / name / f"seed{seed}")}
            data["trainer"] = data["trainer"] | {"max_idle_steps": 0}  # one that collapses is a result
            cells[f"{name}/seed{seed}"] = parse_config(data, f"{name}, seed {seed}")
    return cells


def _for_objective(config: Config, name: str) -> dict[str, Any]:
    """The recipe with another objective: without keywords that one does not know, bounds from step 0 where it has none,
    the section only the first could use, and an advantage made for the first alone. Whatever else does not fit is
    refused by `check`, not dropped."""
    from trimtab.objectives import objective
    from trimtab.objectives.calibrate import bounds_of

    data = config.model_dump(exclude={"compare"}, exclude_none=True)
    if name == config.objective.name:
        return data
    own = REQUIRED_SECTIONS.get(config.objective.name)
    if own is not None and own != REQUIRED_SECTIONS.get(name):
        data.pop(own, None)
    if objective(name).advantage != objective(config.objective.name).advantage:
        data.pop("advantage", None)
    calibrate = config.objective.calibrate and bool(bounds_of(name))
    return data | {"objective": {"name": name, "calibrate": calibrate, **_shared(name, config.objective.keywords)}}


def _shared(name: str, keywords: Mapping[str, Any]) -> dict[str, Any]:
    from trimtab.objectives import keywords_of

    return {key: value for key, value in keywords.items() if key in keywords_of(name)}
