"""`trimtab eval`: measure a model or a run on a task."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from trimtab.cli.output import Json, print_json
from trimtab.errors import TrimtabError, nearest


@dataclass(frozen=True)
class What:
    """What to measure: the task with its options, and what a recipe adds to it."""

    task: str
    options: dict[str, Any]
    reward: Sequence[Any] = ()
    max_tokens: int | None = None
    dtype: str = "bfloat16"


def register(app: typer.Typer) -> None:
    app.command(
        "eval",
        epilog="Example: [bold]trimtab eval smollm2-135m-instruct --task arithmetic --samples 8[/bold]",
    )(evaluate)


def evaluate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL_OR_RUN", help="A model (bundled name, folder, HF id) or a run directory.")
    ],
    task: Annotated[
        str | None,
        typer.Option("--task", metavar="TASK|RECIPE", help="A task or a recipe. Default: the run's own recipe."),
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="An option of the task, or a key of the recipe; repeatable."),
    ] = None,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Responses per problem; 1 is greedy.")] = 1,
    problems: Annotated[
        int | None, typer.Option("--problems", min=1, help="Use the first so many test problems. Default: all.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option("--temperature", min=0.0, help="Default: greedy for one sample, 1 for several.")
    ] = None,
    top_p: Annotated[float, typer.Option("--top-p", min=0.0, max=1.0)] = 1.0,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=1, help="Response length. Default: what the task needs.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0)] = 0,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="bfloat16 or float32. Default: the recipe's, else bfloat16.")
    ] = None,
    which: Annotated[str, typer.Option("--which", help="`last` or `best` checkpoint of a run.")] = "last",
    as_json: Json = False,
) -> None:
    """Accuracy, pass@k and length of a model on the test split of a task, with a 95% interval over problems."""
    is_run = (Path(model) / "config.toml").is_file()
    what = _resolve(task or (str(Path(model) / "config.toml") if is_run else None), sets or [])
    from trimtab import evaluation

    with _model_folder(model, which, is_run) as folder, _progress() as progress:
        result = evaluation.run(
            folder,
            what.task,
            options=what.options,
            reward=what.reward,
            problems=problems,
            samples=samples,
            temperature=temperature,
            top_p=top_p,
            max_tokens=max_tokens or what.max_tokens,
            seed=seed,
            dtype=dtype or what.dtype,
            progress=progress,
        )
    if as_json:
        print_json(result.as_dict())
        return
    from rich.console import Console

    Console(highlight=False).print(result.table())


def _resolve(name: str | None, sets: list[str]) -> What:
    """A task by its name with options, or the task, rewards and limits of a recipe."""
    from trimtab import tasks
    from trimtab.config import load_config, parse_override, recipe_names
    from trimtab.types import RewardSpec

    if name is None:
        raise TrimtabError(f"--task is missing: name a task ({', '.join(tasks.names())}) or a recipe")
    if name in tasks.names():
        return What(name, dict(parse_override(item) for item in sets))
    if not name.endswith(".toml") and name not in recipe_names():
        known = [*tasks.names(), *recipe_names()]
        raise TrimtabError(f"unknown task or recipe {name!r}{nearest(name, known)}")
    config = load_config(name, sets)
    return What(
        config.task.name,
        config.task.keywords,
        [RewardSpec(reward.name, reward.weight, reward.timeout, reward.keywords) for reward in config.reward],
        config.sampling.max_tokens,
        config.engine.dtype,
    )


@contextmanager
def _model_folder(model: str, which: str, is_run: bool) -> Iterator[str]:
    """A name the model loader takes; the model of a run is exported for as long as it is needed."""
    if not is_run:
        # Training means the warm-started one by this name, the model loader the untrained one.
        yield str(_laboratory()) if model == "laboratory" else model
        return
    from trimtab.training.export import export

    with tempfile.TemporaryDirectory(prefix="trimtab-eval-") as folder:
        yield str(export(Path(model), Path(folder) / "model", which))


def _laboratory() -> Path:
    from trimtab.training.sft import laboratory_folder

    return laboratory_folder()


@contextmanager
def _progress() -> Iterator[Any]:
    """A counter on a terminal, on standard error so that results can be piped; nothing elsewhere."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    with console.status("loading the model") as status:
        yield lambda done, total: status.update(f"evaluated {done} of {total} problems")
