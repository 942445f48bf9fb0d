"""`trimtab eval`: measure models, runs and checkpoints on tasks."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trimtab.cli.output import AllowCode, Json, echo, print_json
from trimtab.errors import TrimtabError, require_extra
from trimtab.plugins import allow_code

if TYPE_CHECKING:
    from trimtab.trainer.evaluation import Results

STANDARD_OUTPUT = "-"

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
        "--task",
        metavar="TASK[:KEY=VALUE,...]",
        help="A task or a recipe, with options; a file: file:path=FILE,holdout=1; repeatable. Default: the run's own.",
    ),
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="An option of a single task or recipe; repeatable."),
]
Problems = Annotated[
    int | None, typer.Option("--problems", min=1, help="Use the first so many test problems. Default: all.")
]
Temperature = Annotated[
    float | None, typer.Option("--temperature", min=0.0, help="Default: greedy for one sample, 1 for several.")
]
Limit = Annotated[
    int | None, typer.Option("--max-tokens", min=1, help="Response length. Default: what the task needs.")
]
Dtype = Annotated[
    str | None, typer.Option("--dtype", help="bfloat16 or float32. Default: the run's or recipe's, else bfloat16.")
]
RelayModel = Annotated[
    str | None,
    typer.Option("--relay", metavar="MODEL", help="Also let this model begin every response: pass@k gained."),
]
Ratio = Annotated[
    float | None,
    typer.Option("--relay-ratio", min=0.0, max=0.99, help="Share of its own response the relay keeps. Default: 0.5."),
]
Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="Keep finished batches there; the same command continues."),
]
Markdown = Annotated[
    str | None, typer.Option("--markdown", metavar="FILE", help="Write the tables as Markdown; - prints them.")
]
Scores = Annotated[
    Path | None,
    typer.Option("--scores", metavar="FILE", help="Write the mean score of each problem, for `scores` of a task."),
]


def register(app: typer.Typer) -> None:
    app.command(
        "eval",
        epilog="Example: [bold]trimtab eval smollm2-135m-instruct runs/icepop --task arithmetic --task "
        "file:path=gsm8k-test.jsonl,format=gsm8k,holdout=1 --samples 8 --greedy --out eval/icepop[/bold]",
    )(evaluate)


def evaluate(
    models: Models,
    task: Tasks = None,
    sets: Sets = None,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Responses per problem; 1 is greedy.")] = 1,
    greedy: Annotated[bool, typer.Option("--greedy", help="Also measure greedy accuracy.")] = False,
    problems: Problems = None,
    temperature: Temperature = None,
    top_p: Annotated[float, typer.Option("--top-p", min=0.0, max=1.0)] = 1.0,
    max_tokens: Limit = None,
    seed: Annotated[int, typer.Option("--seed", min=0)] = 0,
    dtype: Dtype = None,
    which: Annotated[str, typer.Option("--which", help="`last` or `best` checkpoint of a run.")] = "last",
    relay: RelayModel = None,
    relay_ratio: Ratio = None,
    out: Out = None,
    markdown: Markdown = None,
    scores: Scores = None,
    trusted: AllowCode = False,
    as_json: Json = False,
) -> None:
    """Tables of avg@n and pass@k with 95% intervals over problems: a row for each model, a column for each task."""
    require_extra("train", "trimtab eval")
    if trusted:
        allow_code()
    from trimtab.cli import eval_sources
    from trimtab.trainer.evaluation import Settings, compare

    _check_files(models, task or [], markdown, scores, as_json)
    if relay is None and relay_ratio is not None:
        raise TrimtabError("--relay-ratio has no effect without --relay: name the model that begins, or leave it out")
    choices = [eval_sources.source(name, which) for name in models]
    if which != "last" and all(item.run is None for item in choices):
        raise TrimtabError(f"--which {which} chooses a checkpoint of a run, and no run is given: leave it out")
    task_choices = eval_sources.tasks_of(task or [], sets or [], choices)
    settings = Settings(
        samples=samples,
        greedy=greedy,
        temperature=temperature,
        top_p=top_p,
        max_tokens=max_tokens,
        problems=problems,
        seed=seed,
        dtype=eval_sources.dtype_of(dtype, choices, task_choices),
        relay_ratio=0.5 if relay_ratio is None else relay_ratio,
    )
    relay_model = eval_sources.source(relay, which).spec() if relay is not None else None
    count = len(choices) * len(task_choices) * len(settings.modes(relay is not None))
    with _interruptible(out), _progress(count) as progress:
        results = compare(
            [item.spec() for item in choices],
            [choice.spec for choice in task_choices],
            settings,
            relay=relay_model,
            out=out,
            progress=progress,
            notes=eval_sources.notes_on_tools(choices, task_choices),
        )
    _show(results, markdown, as_json)
    if scores is not None:
        _write_scores(results, scores)


def _check_files(
    models: Sequence[str], tasks: Sequence[str], markdown: str | None, scores: Path | None, as_json: bool
) -> None:
    """Raises `TrimtabError` where what is to be written cannot be, before a long evaluation."""
    if as_json and markdown == STANDARD_OUTPUT:
        raise TrimtabError("--json and --markdown - both write to standard output: give --markdown a file")
    if markdown is not None and markdown != STANDARD_OUTPUT and (problem := _unwritable(Path(markdown))):
        raise TrimtabError(f"cannot write {markdown}: {problem}; give --markdown another file")
    if scores is not None and (problem := _unwritable(scores)):
        raise TrimtabError(f"cannot write {scores}: {problem}; give --scores another file")
    if scores is not None and (len(models) > 1 or len(tasks) > 1):
        raise TrimtabError("--scores writes the scores of one model on one task: name one of each")


def _write_scores(results: Results, path: Path) -> None:
    """Write a line `{"id": ..., "score": ...}` for each problem: the share of its samples that are correct."""
    from trimtab.runs.atomic import write_text

    modes = [mode for mode in results.modes if mode != "relay"]
    mode = "sampled" if "sampled" in modes else modes[0]
    measured = results.measured[results.models[0], results.tasks[0], mode]
    rows = [{"id": item.id, "score": item.correct / item.scored} for item in measured.problems]
    write_text(Path(os.path.realpath(path)), "".join(json.dumps(row) + "\n" for row in rows))


def _unwritable(path: Path) -> str:
    """Returns why the file cannot be written; empty if it can."""
    if path.exists() and not path.is_file():
        return "it is a folder" if path.is_dir() else "it is not a plain file (- prints)"
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    return "" if os.access(path if path.exists() else path.parent, os.W_OK) else "it is not allowed"


def _show(results: Results, markdown: str | None, as_json: bool) -> None:
    """Print the results, then write the Markdown file, so that a failure to write does not hide the results."""
    if as_json:
        print_json(results.as_dict())
    elif markdown == STANDARD_OUTPUT:
        echo(results.markdown(), nl=False)
    else:
        from trimtab.cli.console import PlainTextConsole

        console = PlainTextConsole()
        if not console.is_terminal:
            console = PlainTextConsole(width=10_000)  # no wrapping in a file or a pipe
        for item in (*(table.table() for table in results.tables()), *results.remarks()):
            console.print(item)
    if markdown is not None and markdown != STANDARD_OUTPUT:
        from trimtab.runs.atomic import write_text

        write_text(Path(os.path.realpath(markdown)), results.markdown())


@contextmanager
def _interruptible(out: Path | None) -> Iterator[None]:
    """On Ctrl-C, adds to the message whether finished batches were kept."""
    try:
        yield
    except KeyboardInterrupt:
        kept = "nothing was kept, --out DIR keeps finished batches" if out is None else "the same command continues"
        raise KeyboardInterrupt(kept) from None


@contextmanager
def _progress(count: int) -> Iterator[Callable[[str, int, int], None]]:
    """Shows a progress bar for each of `count` evaluations on standard error, if that is a terminal."""
    from trimtab.cli.console import PlainTextConsole, progress_bar

    with progress_bar(PlainTextConsole(stderr=True)) as bar:
        current = bar.add_task("loading", total=None)
        numbers = itertools.count(1)

        def on_problems(what: str, done: int, problems: int) -> None:
            if done == 0:
                bar.reset(current, description=f"{next(numbers)}/{count} {what}", total=problems)
            bar.update(current, completed=done)

        yield on_problems
