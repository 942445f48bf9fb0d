"""`trimtab preflight`: checks whether a pair of sampler and trainer agrees well enough to train."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from trimtab.cli.output import Json, Sets, check_page, echo, only_json, print_json
from trimtab.text import fold

if TYPE_CHECKING:
    from trimtab.preflight.engine_pair import Check

LENGTHS = [128, 512, 2048]

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
    list[int] | None, typer.Option(metavar="TOKENS...", min=1, help="Lengths of responses. Default: 128 512 2048.")
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
) -> None:
    """Compare sampler and trainer before anything is trained: is this pair fit to train?

    The sampler writes and the trainer scores the same ids. Weights are changed, published and restored; nothing is
    saved. It judges Trimtab's samplers (embedded, vLLM, servers) and Trimtab's trainer, or a forward as TRL and verl
    make it. For a trainer of your own: trimtab.testing.assert_parity in its tests, trimtab.Monitor in its loop.
    """
    check_page(html, "--html")
    from trimtab.preflight.checklist import run_checks
    from trimtab.preflight.engine_pair import build_pair, default_bound, facts, pair_config
    from trimtab.preflight.preflight_page import write_page

    config = pair_config(model, sampler, dtype, url, sets or [])
    limit = default_bound(config, trainer) if bound is None else bound
    with only_json(as_json), _progress() as (notify, show), build_pair(config, trainer, prompts, limit, notify) as pair:
        chosen = facts(config, trainer)
        show("pair", f"{chosen['sampler']} | {chosen['trainer']} ({chosen['model']})")

        def on_check(check: Check) -> None:
            show(f"{check.status:<6}{check.name}", check.text)

        result = run_checks(pair, lengths or LENGTHS, chosen, notify, on_check)
        show("verdict", result.verdict)
    if html is not None:
        write_page(result, html, shlex.join(["trimtab", *sys.argv[1:]]))
    if as_json:
        print_json(result.as_dict() | {"page": html})
    elif html is not None:
        echo(_row("page", str(html)))
    if not result.ok:
        raise typer.Exit(1)


def _row(label: str, text: str) -> str:
    """Returns the lines of one row; the text of all rows begins at the same column."""
    from trimtab.preflight.checklist import CHECKS
    from trimtab.trainer.display import terminal_width

    return fold([(f"{label:<{len('fail  ') + max(map(len, CHECKS))}}", text)], terminal_width())


@contextmanager
def _progress() -> Iterator[tuple[Callable[[str], None], Callable[[str, str], None]]]:
    """Yields two functions: `notify` announces the next activity, `show` prints a result immediately.

    Activities go to standard error: to a progress bar on a terminal, otherwise one line each. Checks have no such line
    because their results follow.
    """
    from trimtab.preflight.checklist import CHECKS
    from trimtab.trainer.display import PlainTextConsole, progress_bar

    with progress_bar(PlainTextConsole(stderr=True)) as bar:
        task = bar.add_task("loading", total=None)

        def notify(text: str) -> None:
            bar.update(task, description=text)
            if bar.disable and text not in CHECKS:
                echo(f"trimtab preflight: {text}", err=True)

        def show(label: str, text: str) -> None:
            bar.stop()  # a running bar would redirect the line and share it
            echo(_row(label, text))
            bar.start()

        yield notify, show
