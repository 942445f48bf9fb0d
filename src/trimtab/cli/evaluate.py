"""`trimtab eval`: measures models, runs and checkpoints on tasks, which are given by name or by recipe."""

from __future__ import annotations

import itertools
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trimtab.cli.output import AllowCode, Json, print_json
from trimtab.errors import TrimtabError, did_you_mean
from trimtab.plugins import allow_code
from trimtab.runs.layout import CHECKPOINTS, CONFIG

if TYPE_CHECKING:
    from rich.console import RenderableType

    from trimtab.trainer.evaluation import TaskSpec
    from trimtab.trainer.evaluation.eval_results import TextTable

CHECKPOINT = re.compile(r"step-\d{6,}")

Models = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL...",
        help="Models (bundled name, `laboratory`, folder, HF id), run directories, RUN/checkpoints/step-000010.",
    ),
]
Tasks = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TASK[:KEY=VALUE,...]",
        help="A task or a recipe, with options; a file: file:path=FILE,holdout=1; repeatable. Default: the run's own.",
    ),
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="An option of a single task or recipe; repeatable."),
]
Problems = Annotated[int | None, typer.Option(min=1, help="Use the first so many test problems. Default: all.")]
Temperature = Annotated[float | None, typer.Option(min=0.0, help="Default: greedy for one sample, 1 for several.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Response length. Default: what the task needs.")]
Dtype = Annotated[str | None, typer.Option(help="bfloat16 or float32. Default: the run's or recipe's, else bfloat16.")]


def evaluate(
    models: Models,
    task: Tasks = None,
    sets: Sets = None,
    samples: Annotated[int, typer.Option(min=1, help="Responses per problem; 1 is greedy.")] = 1,
    greedy: Annotated[bool, typer.Option("--greedy", help="Also measure greedy accuracy.")] = False,
    problems: Problems = None,
    temperature: Temperature = None,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0)] = 1.0,
    max_tokens: Limit = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    dtype: Dtype = None,
    which: Annotated[str, typer.Option(help="`last` or `best` checkpoint of a run.")] = "last",
    trusted: AllowCode = False,
    as_json: Json = False,
) -> None:
    """Tables of avg@n and pass@k with 95% intervals over problems: a row for each model, a column for each task."""
    if trusted:
        allow_code()
    from trimtab.trainer.display import PlainTextConsole, progress, terminal_width
    from trimtab.trainer.evaluation import ModelSpec, Settings, compare

    choices = [find_model(name, which) for name in models]
    if which != "last" and all(item.run is None for item in choices):
        raise TrimtabError(f"--which {which} chooses a checkpoint of a run, and no run is given: leave it out")
    specs = choose_tasks(task or [], sets or [], choices)
    settings = Settings(
        samples=samples,
        greedy=greedy,
        temperature=temperature,
        top_p=top_p,
        max_tokens=max_tokens,
        problems=problems,
        seed=seed,
        dtype=choose_dtype(dtype, choices, specs),
    )
    count = len(choices) * len(specs) * len(settings.modes())
    numbers = itertools.count(1)
    with progress("loading") as update:

        def on_problems(what: str, done: int, total: int) -> None:
            first = {"description": f"{next(numbers)}/{count} {what}"} if done == 0 else {}
            update(completed=done, total=total, **first)

        results = compare(
            [ModelSpec(item.label, item.folder) for item in choices],
            specs,
            settings,
            progress=on_problems,
            notes=note_missing_tools(choices, specs),
        )
    if as_json:
        print_json(results.as_dict())
        return
    console = PlainTextConsole(width=terminal_width() or 10_000)  # no wrapping in a file or a pipe
    for item in (*map(rich_table, results.tables()), *results.remarks()):
        console.print(item)


def rich_table(table: TextTable) -> RenderableType:
    """Returns a table for a terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=SIMPLE_HEAD, pad_edge=False)
    for number, name in enumerate(table.columns):
        drawn.add_column(Text(name), justify="left" if number < table.labels else "right", overflow="fold")
    for row in table.rows:
        drawn.add_row(*(Text(cell) for cell in row))
    return Group(Text(table.title, style="bold"), drawn)


@dataclass(frozen=True)
class ModelChoice:
    """A model named on the command line."""

    name: str
    run: Path | None  # its run directory, if it is a run
    which: str  # the checkpoint of the run

    @property
    def label(self) -> str:
        """The name of the model in tables."""
        return f"{self.name} ({self.which})" if self.run is not None and self.which == "best" else self.name

    @contextmanager
    def folder(self) -> Iterator[str]:
        """Yields a name or folder for the model loader; the model of a run is exported to a temporary folder."""
        from trimtab.trainer.config import LABORATORY_MODELS

        if self.run is not None:
            from trimtab.trainer.export import export

            with tempfile.TemporaryDirectory(prefix="trimtab-eval-") as folder:
                yield str(export(self.run, Path(folder) / "model", self.which))
        elif self.name in LABORATORY_MODELS:
            # In training this name means the warm-started model; the model loader would load the untrained model.
            from trimtab.trainer.sft import laboratory_folder

            yield str(laboratory_folder(self.name))
        else:
            yield self.name


def find_model(name: str, which: str) -> ModelChoice:
    """Returns the model for `name`: a run directory, RUN/checkpoints/step-000010, or a name for the model loader."""
    path, name = Path(name).absolute(), name.rstrip("/") or name
    if (path / CONFIG).is_file():
        return ModelChoice(name, Path(name), which)
    if CHECKPOINT.fullmatch(path.name) and path.parent.name == CHECKPOINTS:
        return ModelChoice(name, path.parent.parent, path.name)
    return ModelChoice(name, None, which)


def choose_tasks(named: Sequence[str], sets: Sequence[str], sources: Sequence[ModelChoice]) -> list[TaskSpec]:
    """Returns the tasks given by `--task`, or by default the task that all runs were trained on."""
    from trimtab.trainer import tasks

    if named:
        if sets and len(named) > 1:
            raise TrimtabError("--set changes one task; with several, write each as --task NAME:KEY=VALUE,KEY=VALUE")
        return [_parse_task(text, sets) for text in named]
    recipes = [_read_recipe(name, sets) for name in _list_recipes(sources)]
    if len(recipes) < len(sources):
        raise TrimtabError(f"--task is missing: name a task ({', '.join(tasks.KINDS.names())}) or a recipe")
    if any(spec != recipes[0] for spec in recipes):
        raise TrimtabError(
            "the runs were trained on different tasks, rewards, environments or sampling.max_tokens: choose what to "
            f"measure for all of them, such as --task {_list_recipes(sources)[0]}"
        )
    return recipes[:1]


def _list_recipes(sources: Sequence[ModelChoice]) -> list[str]:
    return [str(item.run / CONFIG) for item in sources if item.run is not None]


def note_missing_tools(sources: Sequence[ModelChoice], specs: Sequence[TaskSpec]) -> list[str]:
    """Returns a line for each run that was trained with tools and is measured without them."""
    from trimtab.trainer.config import load_config

    bare = [spec.name for spec in specs if spec.environment is None]
    return [
        f"{Path(recipe).parent} was trained with the tools of environment {environment.name!r} and is measured "
        f"without them on {', '.join(bare)}; --task {recipe} measures with them"
        for recipe in (_list_recipes(sources) if bare else [])
        if (environment := load_config(recipe).environment)
    ]


def choose_dtype(requested: str | None, sources: Sequence[ModelChoice], specs: Sequence[TaskSpec]) -> str:
    """Returns the requested dtype, by default the sampling dtype of the recipes and runs, otherwise bfloat16.

    Raises `TrimtabError` if recipes and runs have different dtypes and none is requested.
    """
    if requested is not None:
        return requested
    from trimtab.trainer.config import load_config

    runs = [load_config(name).engine.dtype for name in _list_recipes(sources)]
    known = sorted({*runs, *filter(None, (spec.recipe_dtype for spec in specs))})
    if len(known) > 1:
        raise TrimtabError(f"the recipes sample in {' and '.join(known)}: choose one for all with --dtype")
    return known[0] if known else "bfloat16"


def _parse_task(text: str, sets: Sequence[str]) -> TaskSpec:
    """Parses `NAME` or `NAME:KEY=VALUE,...`, where NAME is a task or a recipe."""
    from trimtab.trainer import tasks
    from trimtab.trainer.config import is_recipe, parse_override, recipe_names, split_overrides
    from trimtab.trainer.evaluation import TaskSpec

    name, _, rest = text.partition(":")
    changes = [*split_overrides(rest, f"--task {text!r}"), *sets]
    if name in tasks.KINDS.names():
        return TaskSpec(name, dict(parse_override(change) for change in changes))
    if name.endswith((".jsonl", ".ndjson", ".json", ".csv", ".parquet")):
        raise TrimtabError(f"--task {text!r}: a file is measured on as --task file:path={name},holdout=1")
    if not is_recipe(name):
        raise TrimtabError(
            f"unknown task or recipe {name!r}{did_you_mean(name, [*tasks.KINDS.classes, *recipe_names()])}"
        )
    return _read_recipe(name, changes)


def _read_recipe(name: str, changes: Sequence[str]) -> TaskSpec:
    from trimtab.trainer.config import load_config
    from trimtab.trainer.evaluation import TaskSpec
    from trimtab.types import RewardSpec

    config = load_config(name, changes)
    rewards = tuple(RewardSpec(reward.name, reward.weight, reward.timeout, reward.keywords) for reward in config.reward)
    limit, dtype = config.sampling.max_tokens, config.engine.dtype
    return TaskSpec(config.task.name, config.task.keywords, rewards, limit, config.environment, dtype)
