"""Training from Python in one call; the command line does the same with a display."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trimtab.config import Config, load_config
from trimtab.errors import TrimtabError
from trimtab.objectives import Objective
from trimtab.report.run_report import write_report
from trimtab.runs.reader import read_run
from trimtab.training.observer import NullObserver, Observer
from trimtab.training.ranks import follows
from trimtab.training.run import RunResult
from trimtab.training.run import train as run_training
from trimtab.types import Problem


def train(
    config: Config | Mapping[str, Any] | str | Path,
    *,
    reward: Callable[[str, Problem], float] | None = None,
    objective: Objective | None = None,
    overrides: Sequence[str] = (),
    out: Path | str | None = None,
    resume: bool = False,
    observer: Observer | None = None,
    progress: bool = True,
) -> RunResult:
    """Train with a recipe (its name, a TOML file, a mapping, or a `Config`) and write `report.html` into the run.

    `reward(completion, problem)` replaces the recipe's rewards; it runs in a child process with a time and memory
    limit, and a call that fails costs its sample, never the run. `objective` takes the place of the recipe's, which may
    then have no keywords; a run resumed later must be given the same. `overrides` are `section.key=value` strings.
    `progress` writes a line for each step, and other messages, to standard error, unless there is an `observer`.
    Ctrl-C and SIGTERM end the run after the step in progress, with a checkpoint; a second one ends it at once.

    Raises `TrimtabError`, in one line, for anything the caller can mend.
    """
    resolved = config if isinstance(config, Config) else load_config(config, overrides)
    if resolved.compare is not None:
        raise TrimtabError(
            "the recipe has a [compare] section, which trains several runs: use `trimtab train`, or leave the section "
            "out and call this once for each objective and seed"
        )
    watcher = NullObserver() if follows() else observer or (_lines() if progress else NullObserver())
    if resolved.placement == "ray":
        if reward is not None:
            raise TrimtabError(
                'a function does not travel to a cluster: name it in the recipe, reward.name = "module:it"'
            )
        if objective is not None:
            raise TrimtabError(
                "an objective given in code does not travel to a cluster: name a function that returns it, "
                'objective.name = "module:it"'
            )
        from trimtab.cluster.driver import train as run_on_cluster

        result = run_on_cluster(resolved, out=out, resume=resume, observer=watcher)
    else:
        result = run_training(resolved, reward=reward, objective=objective, out=out, resume=resume, observer=watcher)
    if follows():
        return result  # the leader reports
    watcher.finished(_held_out(result.run), write_report(result.run))
    return result


def _lines() -> Observer:
    from rich.console import Console

    from trimtab.cli.display import PlainDisplay

    return PlainDisplay(Console(stderr=True, highlight=False))


def _held_out(run: Path) -> dict[str, float | str]:
    """`eval/<task>/before` and `/after`, where they were measured, and `/problems`, on how many."""
    summary: dict[str, float | str] = {}
    read = read_run(run)
    for task, found in read.accuracy().items():
        ends = {"before": found.before, "after": found.after}
        summary |= {f"eval/{task}/{moment}": value for moment, value in ends.items() if value is not None}
        summary |= {f"eval/{task}/problems": int(count) for count in read.series(f"eval/{task}/problems")[1][-1:]}
    return summary
