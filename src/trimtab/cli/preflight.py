"""`trimtab preflight`: is this pair of sampler and trainer fit to train?"""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from trimtab.cli.compare import MultiValueCommand
from trimtab.cli.output import Json, Sets, echo, only_json, print_json
from trimtab.errors import TrimtabError, require_extra

if TYPE_CHECKING:
    from trimtab.preflight.checklist import Preflight

LENGTHS = [128, 512, 2048]
LEVELS = {"fail": "error", "note": "warning", "ok": "notice"}
"""Status of a check -> command of GitHub's workflows."""

Model = Annotated[str, typer.Argument(metavar="MODEL", help="HF id, folder, bundled model, or recipe.")]
Sampler = Annotated[
    Literal["embedded", "vllm", "server"] | None,
    typer.Option(help="What writes. Default: that of the recipe, else embedded."),
]
Scorer = Annotated[
    Literal["trimtab", "transformers"],
    typer.Option(help="What scores: Trimtab's packed pass, or the model's own forward of a padded batch."),
]
Dtype = Annotated[
    Literal["float32", "bfloat16"] | None,
    typer.Option(help="Of both sides; --set engine.dtype and model.autocast are for one. Default: the recipe's."),
]
Lengths = Annotated[
    list[int] | None,
    typer.Option(metavar="TOKENS...", min=1, help="Lengths of responses. Default: 128 512 2048."),
]
Urls = Annotated[list[str] | None, typer.Option(metavar="URL", help="With --sampler server: where it runs.")]
PromptFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Prompts, one a line. Default: those of the task.")
]
Bound = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="Largest k3 in nats per token. Default: 1e-8 in float32, 1e-2 in 16 bits, 1e-1 quantized, 0 with "
        "invariant numerics.",
    ),
]
HtmlPage = Annotated[Path | None, typer.Option(metavar="PAGE", help="Write a page.")]
Github = Annotated[bool, typer.Option("--github", help="Print annotations for a GitHub workflow.")]


def register(app: typer.Typer) -> None:
    app.command(
        "preflight",
        cls=MultiValueCommand,
        epilog="Example: [bold]trimtab preflight laboratory[/bold]. The exit code is 0 if the pair is fit to train, 1 "
        "if a check fails, 2 if it cannot run.",
    )(preflight)


def preflight(
    model: Model,
    sampler: Sampler = None,
    trainer: Scorer = "trimtab",
    dtype: Dtype = None,
    lengths: Lengths = None,
    url: Urls = None,
    prompts: PromptFile = None,
    bound: Bound = None,
    sets: Sets = None,
    as_json: Json = False,
    html: HtmlPage = None,
    github: Github = False,
) -> None:
    """Compare sampler and trainer before anything is trained: is this pair fit to train?

    The sampler writes and the trainer scores the same ids. Weights are changed, published and restored; nothing is
    saved.
    """
    require_extra("train", "trimtab preflight")
    if html is not None and html.suffix.lower() not in (".html", ".htm"):
        raise TrimtabError(f"--html {html} is not a page: give a name that ends in .html")
    from trimtab.preflight.build_pair import build_pair, default_bound, facts, pair_config
    from trimtab.preflight.checklist import run
    from trimtab.preflight.preflight_page import write_page
    from trimtab.preflight.receipt import receipt

    config = pair_config(model, sampler, dtype, url, sets or [])
    limit = default_bound(config, trainer) if bound is None else bound
    with only_json(as_json), tempfile.TemporaryDirectory() as folder, _progress() as notify:
        pair = build_pair(config, trainer, prompts, limit, Path(folder), notify)
        try:
            record = receipt(config, trainer, pair, lengths or LENGTHS)
            result = replace(run(pair, lengths or LENGTHS, facts(config, trainer), notify), receipt=record)
        finally:
            pair.engine.close()
    if html is not None:
        write_page(result, html, shlex.join(["trimtab", *sys.argv[1:]]))
    if as_json:
        print_json(result.as_dict() | {"page": html})
    else:
        _show(result, html)
    if github:
        for line in github_lines(result):
            echo(line, err=as_json)
    if not result.ok:
        raise typer.Exit(1)


def _show(result: Preflight, page: Path | None) -> None:
    from trimtab.cli.console import PlainTextConsole
    from trimtab.diagnosis.output.terminal import folded

    console = PlainTextConsole()
    rows = [("pair", f"{result.facts['sampler']} | {result.facts['trainer']} ({result.facts['model']})")]
    rows += [(f"{check.status:<6}{check.name}", check.text) for check in result.checks]
    rows.append(("verdict", result.verdict))
    if result.receipt is not None:
        rows.append(("receipt", result.receipt["sha256"]))
    if page is not None:
        rows.append(("page", str(page)))
    echo(folded(rows, console.width if console.is_terminal else None))


def github_lines(result: Preflight) -> list[str]:
    """Returns a line for each check that did not pass, as GitHub's workflows read them from standard output."""
    escaped = str.maketrans({"%": "%25", "\r": "%0D", "\n": "%0A"})
    return [
        f"::{LEVELS[check.status]} title=trimtab preflight: {check.name}::{check.text.translate(escaped)}"
        for check in result.checks
        if check.status != "ok"
    ]


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Shows what is done at the moment on standard error, if that is a terminal."""
    from trimtab.cli.console import PlainTextConsole, progress_bar

    with progress_bar(PlainTextConsole(stderr=True)) as bar:
        task = bar.add_task("loading", total=None)
        yield lambda text: bar.update(task, description=text)
