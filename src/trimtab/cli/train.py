"""`trimtab train`, `trimtab sft` and `trimtab export`."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trimtab.cli import starting
from trimtab.cli.output import Json, Recipe, Sets, echo, only_json, print_json, print_result, run_directory
from trimtab.runs.layout import CONFIG, REPORT

if TYPE_CHECKING:
    from trimtab.trainer.config import Config

Out = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Run directory. Default: runs/RECIPE.", show_default=False)
]


def train(
    recipe: Recipe,
    sets: Sets = None,
    out: Out = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run that DIR already holds.")] = False,
    as_json: Json = False,
) -> None:
    """Train a model with a recipe; a recipe with a \\[compare] section trains every objective with every seed."""
    config = _load(recipe, sets)
    with starting.guarded():
        from trimtab.api import train as train_recipe
        from trimtab.report.health import as_data, health
        from trimtab.runs.reader import read_run
        from trimtab.trainer.display import RunDisplay, open_display
        from trimtab.trainer.ranks import is_follower

    run = run_directory(recipe, out, config.out)
    try:
        with only_json(as_json):
            if config.compare is not None:
                result = _compare(config, run, resume, to_stderr=as_json)
            else:
                with open_display(RunDisplay, to_stderr=as_json) as observer:
                    result = train_recipe(config, out=run, resume=resume, observer=observer).metrics
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_resume_hint(recipe, sets or (), run, config.compare is not None)) from None
    if as_json and not is_follower():
        data = {"run": run, "report": run / REPORT, "metrics": result}
        print_json(data if config.compare is not None else data | {"verdict": as_data(health(read_run(run)))})


def _load(recipe: str, sets: Sequence[str] | None) -> Config:
    """Reads the recipe before torch is imported, so that an error in it is reported immediately."""
    with starting.guarded():
        from trimtab.trainer.config import load_config

    return load_config(recipe, sets or ())


def _compare(config: Config, out: Path, resume: bool, *, to_stderr: bool) -> dict[str, Any]:
    from trimtab.errors import TrimtabError
    from trimtab.report.comparison import compare, list_accuracies, write_page
    from trimtab.runs.reader import read_steps
    from trimtab.trainer.display import RunsDisplay, closing_lines, open_display
    from trimtab.trainer.lab.runner import run_recipe_comparison
    from trimtab.trainer.ranks import launched_by_torchrun

    if launched_by_torchrun():
        raise TrimtabError("a comparison starts other processes (compare.workers): run it without torchrun")
    with open_display(RunsDisplay, to_stderr=to_stderr) as observer:
        runs = run_recipe_comparison(config, out, observer, resume=resume)
    comparison = compare(runs)
    page = write_page(comparison, out / REPORT)
    echo("\n".join([*closing_lines(list_accuracies(comparison.groups)), f"report: {page}"]), err=to_stderr)
    return {str(run.relative_to(out)): read_steps(run)[-1] for run in runs}


def sft(recipe: Recipe, sets: Sets = None, out: Out = None, as_json: Json = False) -> None:
    """Warm-start a model on the task's own answers (supervised), before reinforcement learning."""
    config = _load(recipe, sets)
    from trimtab.trainer.display import RunDisplay, open_display

    run = run_directory(recipe, out, config.out)
    with only_json(as_json), open_display(RunDisplay, to_stderr=as_json) as observer:
        from trimtab.trainer.sft import supervised_warm_start

        metrics = supervised_warm_start(config, out=run, observer=observer)
    print_result(as_json, {"model": run, "metrics": metrics}, f"model: {run}")


def _resume_hint(recipe: str, sets: Sequence[str], run: Path, is_comparison: bool) -> str:
    """Returns how to continue after Ctrl-C or SIGTERM, with the command; empty on all ranks except rank 0."""
    set_options = [word for change in sets for word in ("--set", change)]
    command = shlex.join(["trimtab", "train", recipe, *set_options, "--out", str(run)])
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        if os.environ.get("RANK") != "0":
            return ""  # only rank 0 prints the command
        command = "the same command"
    has_runs = is_comparison and run.is_dir() and any(run.iterdir())
    if has_runs or any(run.glob("checkpoints/step-*")):
        return f"continue with: {command} --resume"
    if (run / CONFIG).is_file():
        return f"no checkpoint was written yet, this begins again: {command} --resume"
    return f"nothing was written yet, start again with: {command}"


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder for the model.")],
    which: Annotated[str, typer.Option(help="`last` or `best` checkpoint.")] = "last",
    adapter: Annotated[
        bool, typer.Option("--adapter", help="The LoRA adapter alone, as peft loads it, instead of the merged model.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write the trained model as a folder that transformers loads (config, tokenizer, safetensors)."""
    from trimtab.trainer.export import export as write
    from trimtab.trainer.export import export_adapter

    (export_adapter if adapter else write)(run, folder, which)
    what = "adapter" if adapter else "model"
    print_result(as_json, {what: folder}, f"{what}: {folder}")
