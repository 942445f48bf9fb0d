"""For scripts: `train`, the Python counterpart of the command `trimtab train`, without its display."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trimtab.errors import TrimtabError
from trimtab.objectives import Objective
from trimtab.report.health import health
from trimtab.report.run_report import write_report
from trimtab.runs.reader import Run, read_run
from trimtab.trainer.config import Config, load_config
from trimtab.trainer.config.rollout_sections import EnvironmentConfig
from trimtab.trainer.display import PlainTextConsole, RunDisplay, progress_bar
from trimtab.trainer.observer import NullObserver, Observer
from trimtab.trainer.ranks import is_follower
from trimtab.trainer.run import TrainResult
from trimtab.trainer.run import train as run_training
from trimtab.types import Problem


def train(
    config: Config | Mapping[str, Any] | str | Path,
    *,
    reward: Callable[[str, Problem], float] | None = None,
    objective: Objective | None = None,
    environment: type | None = None,
    overrides: Sequence[str] = (),
    out: Path | str | None = None,
    resume: bool = False,
    observer: Observer | None = None,
    progress: bool = True,
) -> TrainResult:
    """Train with a recipe and write `report.html` into the run directory.

    `config` is a recipe name, the path of a TOML file, a mapping, or a `Config`.
    `reward(completion, problem)` replaces the recipe's rewards. It runs in a child process with a time and a memory
    limit; a failing call drops its sample and does not end the run.
    `objective` replaces the recipe's objective; the `[objective]` section may then have no keywords. A resumed run must
    be given the same objective.
    `environment` is the environment class of multi-turn episodes (docs/environments.md). It replaces the recipe's
    `environment.name`.
    `overrides` are `section.key=value` strings; they are not allowed with a `Config`.
    `progress` writes a line for each step, and other messages, to standard error, unless an `observer` is given.

    Ctrl-C and SIGTERM end the run after the current step with a checkpoint; a second signal ends it immediately.
    Raises `TrimtabError`, with a one-line message, for every error that the caller can correct.
    """
    resolved = _resolve(config, overrides, environment)
    if resolved.compare is not None:
        raise TrimtabError(
            "the recipe has a [compare] section, which trains several runs: use `trimtab train`, or leave the section "
            "out and call this once for each objective and seed"
        )
    lines = RunDisplay(progress_bar(PlainTextConsole(stderr=True))) if progress else NullObserver()
    run_observer = NullObserver() if is_follower() else observer or lines
    if resolved.placement == "ray":
        _refuse_code_on_cluster(reward=reward, objective=objective, environment=environment)
        from trimtab.trainer.cluster.driver import train as run_on_cluster

        result = run_on_cluster(resolved, out=out, resume=resume, observer=run_observer)
    else:
        result = run_training(
            resolved,
            reward=reward,
            objective=objective,
            environment=environment,
            out=out,
            resume=resume,
            observer=run_observer,
        )
    if is_follower():
        return result  # only the leader writes the report
    run = read_run(result.run)
    run_observer.finished(_summary(run), write_report(run))
    return result


def _refuse_code_on_cluster(**given: Any) -> None:
    """Raises `TrimtabError` if a part is given in code: code cannot be sent to other machines."""
    kind = {"reward": "function", "objective": "function", "environment": "Class"}
    for name, part in given.items():
        if part is not None:
            raise TrimtabError(
                f"{name} is given in code, which cannot be sent to a cluster: name it in the recipe, {name}.name = "
                f'"module:{kind[name]}"'
            )


def _resolve(
    config: str | Path | Mapping[str, Any] | Config, overrides: Sequence[str], environment: type | None
) -> Config:
    """Returns the resolved recipe, with `environment.name` set to the given class."""
    if isinstance(config, Config) and overrides:
        raise TrimtabError(
            f"overrides {list(overrides)} would not change a Config, which is complete: give the name, file or mapping "
            "of the recipe in its place, or pass them to load_config"
        )
    if environment is None:
        return config if isinstance(config, Config) else load_config(config, overrides)
    if not isinstance(environment, type):
        raise TrimtabError(f"environment is a class, not an instance of {type(environment).__name__}")
    name = f"{environment.__module__}:{environment.__qualname__}"
    if not isinstance(config, Config):
        return load_config(config, [*overrides, f"environment.name={name}"])
    section = config.environment or EnvironmentConfig(name="")
    return config.model_copy(update={"environment": section.model_copy(update={"name": name})})


def _summary(run: Run) -> dict[str, float | str]:
    """Returns the verdict and, for each task, `eval/<task>/before`, `/after` and `/problems` (count) if measured."""
    summary: dict[str, float | str] = {}
    for task, accuracy in run.accuracy().items():
        values = {"before": accuracy.before, "after": accuracy.after}
        summary |= {f"eval/{task}/{moment}": value for moment, value in values.items() if value is not None}
        summary |= {f"eval/{task}/problems": int(count) for count in run.series(f"eval/{task}/problems")[1][-1:]}
    return summary | {"verdict": health(run).text}
