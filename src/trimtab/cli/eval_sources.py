"""Parses the arguments of `trimtab eval`: runs, checkpoints and models; tasks with options, and recipes."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trimtab.errors import TrimtabError, did_you_mean
from trimtab.trainer.config import LABORATORY_MODELS

if TYPE_CHECKING:
    from trimtab.trainer.evaluation import ModelSpec, TaskSpec

CHECKPOINT = re.compile(r"step-\d{6,}")


@dataclass(frozen=True)
class ModelChoice:
    """A model named on the command line; `run` is its run directory, if any, and `which` the checkpoint."""

    name: str
    run: Path | None
    which: str

    @property
    def label(self) -> str:
        """The name of the model in tables."""
        return f"{self.name} ({self.which})" if self.run is not None and self.which == "best" else self.name

    def spec(self) -> ModelSpec:
        from trimtab.trainer.evaluation import ModelSpec

        return ModelSpec(self.label, self._folder)

    @contextmanager
    def _folder(self) -> Iterator[str]:
        """Yields a name for the model loader; the model of a run is exported to a temporary folder."""
        if self.run is not None:
            from trimtab.trainer.export import export

            with tempfile.TemporaryDirectory(prefix="trimtab-eval-") as folder:
                yield str(export(self.run, Path(folder) / "model", self.which))
        elif self.name in LABORATORY_MODELS:
            # Training uses this name for the warm-started model, the model loader for the untrained one.
            from trimtab.trainer.sft import laboratory_folder

            yield str(laboratory_folder(self.name))
        else:
            yield self.name


@dataclass(frozen=True)
class TaskChoice:
    """A task to evaluate on, and the precision of the recipe it comes from."""

    spec: TaskSpec
    dtype: str | None = None


def source(name: str, which: str) -> ModelChoice:
    """Returns the model for a run directory, RUN/checkpoints/step-000010, or a name for the model loader."""
    path, name = Path(name).absolute(), name.rstrip("/") or name
    if (path / "config.toml").is_file():
        return ModelChoice(name, Path(name), which)
    if CHECKPOINT.fullmatch(path.name) and path.parent.name == "checkpoints":
        return ModelChoice(name, path.parent.parent, path.name)
    return ModelChoice(name, None, which)


def recipe_of(run: Path) -> str:
    return str(run / "config.toml")


def tasks_of(named: Sequence[str], sets: Sequence[str], sources: Sequence[ModelChoice]) -> list[TaskChoice]:
    """Returns the tasks of `--task`, or by default the task that all runs were trained on."""
    from trimtab.trainer import tasks

    if named:
        if sets and len(named) > 1:
            raise TrimtabError("--set changes one task; with several, write each as --task NAME:KEY=VALUE,KEY=VALUE")
        return [_task(text, sets) for text in named]
    recipes = [_recipe(recipe_of(item.run), sets) for item in sources if item.run is not None]
    if len(recipes) < len(sources):
        raise TrimtabError(f"--task is missing: name a task ({', '.join(tasks.names())}) or a recipe")
    if any(choice.spec != recipes[0].spec for choice in recipes):
        runs = [recipe_of(item.run) for item in sources if item.run is not None]
        raise TrimtabError(
            "the runs were trained on different tasks, rewards, environments or sampling.max_tokens: choose what to "
            f"measure for all of them, such as --task {runs[0]}"
        )
    return recipes[:1]


def notes_on_tools(sources: Sequence[ModelChoice], choices: Sequence[TaskChoice]) -> list[str]:
    """Returns a line for each run that was trained with tools and is measured without them."""
    from trimtab.trainer.config import load_config

    bare = [choice.spec.name for choice in choices if choice.spec.environment is None]
    notes = []
    for item in sources if bare else ():
        environment = None if item.run is None else load_config(recipe_of(item.run)).environment
        if item.run is not None and environment is not None:
            notes.append(
                f"{item.name} was trained with the tools of environment {environment.name!r} and is measured without "
                f"them on {', '.join(bare)}"
            )
            if len(bare) == len(choices) and not environment.name.startswith("__main__:"):
                trusted = " --allow-code" if ":" in environment.name else ""
                notes[-1] += f"; --task {recipe_of(item.run)}{trusted} measures with them"
    return notes


def dtype_of(requested: str | None, sources: Sequence[ModelChoice], choices: Sequence[TaskChoice]) -> str:
    """Returns the requested precision, or by default that of the recipes and runs, or bfloat16.

    Raises `TrimtabError` if recipes and runs differ in precision.
    """
    if requested is not None:
        return requested
    from trimtab.trainer.config import load_config

    runs = [load_config(recipe_of(item.run)).engine.dtype for item in sources if item.run is not None]
    known = sorted({*runs, *(choice.dtype for choice in choices if choice.dtype is not None)})
    if len(known) > 1:
        raise TrimtabError(f"the recipes sample in {' and '.join(known)}: choose one for all with --dtype")
    return known[0] if known else "bfloat16"


def _task(text: str, sets: Sequence[str]) -> TaskChoice:
    """Parses `NAME` or `NAME:KEY=VALUE,...`, where the name is that of a task or a recipe."""
    from trimtab.trainer import tasks
    from trimtab.trainer.config import is_recipe, parse_override, recipe_names, split_overrides
    from trimtab.trainer.evaluation import TaskSpec

    name, _, rest = text.partition(":")
    changes = [*split_overrides(rest, f"--task {text!r}"), *sets]
    if name in tasks.names():
        return TaskChoice(TaskSpec(name, dict(parse_override(change) for change in changes)))
    if name.endswith((".jsonl", ".ndjson", ".json", ".csv", ".parquet")):
        raise TrimtabError(f"--task {text!r}: a file is measured on as --task file:path={name},holdout=1")
    if not is_recipe(name):
        raise TrimtabError(f"unknown task or recipe {name!r}{did_you_mean(name, [*tasks.names(), *recipe_names()])}")
    return _recipe(name, changes)


def _recipe(name: str, changes: Sequence[str]) -> TaskChoice:
    from trimtab.trainer.config import load_config
    from trimtab.trainer.evaluation import TaskSpec
    from trimtab.trainer.rollout.episode_responses import environment_spec
    from trimtab.types import RewardSpec

    config = load_config(name, changes)
    rewards = tuple(RewardSpec(reward.name, reward.weight, reward.timeout, reward.keywords) for reward in config.reward)
    environment = environment_spec(config)
    spec = TaskSpec(config.task.name, config.task.keywords, rewards, config.sampling.max_tokens, environment)
    return TaskChoice(spec, config.engine.dtype)
