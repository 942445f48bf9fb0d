"""`trimtab diagnose`: measures the mismatch between trainer and sampler and recommends a correction."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trimtab.cli.output import Json, print_json
from trimtab.errors import TrimtabError

if TYPE_CHECKING:
    from trimtab.diagnosis.pipeline import OnProgress

PAGE = "diagnose.html"
Files = Annotated[
    list[Path],
    typer.Argument(
        metavar="FILE...",
        help="Files of log-probs (parquet, JSON, CSV, gzipped or not, ...), folders of them, or run directories.",
    ),
]
Framework = Annotated[
    str | None,
    typer.Option(
        "--framework", metavar="NAME", help="trimtab, verl, trl, miles, prime-rl or nemo-rl. Default: found out."
    ),
]
Columns = Annotated[
    list[str] | None,
    typer.Option(
        "--columns",
        metavar="OURS=THEIRS",
        help="A column of the files under the name used here, as logp_behavior=rollout_logprobs; repeat it, or "
        "separate several by commas. `OURS=` leaves a column of the files out.",
    ),
]
TokenizerName = Annotated[
    str | None,
    typer.Option(
        "--tokenizer",
        metavar="PATH",
        help="For the texts of token ids: a tokenizer.json, the folder of a model or run that holds one, or a model in "
        "the local Hugging Face cache. Default: that of the run, if the files are of one.",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="FILE.html", help=f"Where the page goes. Default: {PAGE} in the current folder."),
]


def register(app: typer.Typer) -> None:
    app.command(
        "diagnose",
        epilog="Example: [bold]trimtab diagnose runs/quickstart --out quickstart.html[/bold]. The exit code is 0 "
        "whatever is found, 2 when the files cannot be used; programs read --json.",
    )(diagnose)


def diagnose(
    files: Files,
    framework: Framework = None,
    columns: Columns = None,
    tokenizer: TokenizerName = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Compare trainer and sampler: how large the mismatch is, where it sits, what causes it, what to do."""
    names = parse_columns(columns or [])
    target = page_path(out)

    from trimtab.diagnosis.output.as_json import as_dict
    from trimtab.diagnosis.output.html_page import write_page
    from trimtab.diagnosis.output.terminal import verdict
    from trimtab.diagnosis.pipeline import diagnose as run

    with _progress() as on_progress:
        diagnosis = run(files, framework=framework, columns=names, tokenizer=tokenizer, on_progress=on_progress)
        on_progress("drawing the page", diagnosis.measured.origin.tokens)
        page = write_page(diagnosis, target)
    if as_json:
        print_json({**as_dict(diagnosis), "report": page})
    else:
        typer.echo(verdict(diagnosis, page, _width()))


def parse_columns(given: Sequence[str]) -> dict[str, str]:
    """Parses `OURS=THEIRS` pairs, several of them separated by commas; an empty THEIRS leaves the column out.

    Raises `TrimtabError` for a malformed pair or a column that is named twice.
    """
    columns: dict[str, str] = {}
    for pair in (part.strip() for word in given for part in word.split(",")):
        ours, equals, theirs = (part.strip() for part in pair.partition("="))
        if not (ours and equals):  # only the name after the = may be empty
            raise TrimtabError(f"--columns {pair!r} is no pair: write OURS=THEIRS, as logp_behavior=rollout_logprobs")
        if ours in columns:
            raise TrimtabError(f"--columns names {ours!r} twice: leave one of the two out")
        columns[ours] = theirs
    return columns


def page_path(out: Path | None) -> Path:
    """Returns the path of the page: `diagnose.html` in a folder, or the file `out`.

    Raises `TrimtabError` unless the name ends in .html or .htm, so that a data file is never overwritten.
    """
    target = Path(PAGE) if out is None else out / PAGE if out.is_dir() else out
    if target.suffix.lower() not in (".html", ".htm"):
        raise TrimtabError(f"--out {target} is no page: give a name that ends in .html, or a folder that exists")
    return target


def _width() -> int | None:
    """Returns the width of the terminal; None for a file or a pipe, where lines are not wrapped."""
    from rich.console import Console

    console = Console()
    return console.width if console.is_terminal else None


@contextmanager
def _progress() -> Iterator[OnProgress]:
    """Shows the current activity in a transient line on standard error, if that is a terminal."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield _ignore
        return
    start = time.monotonic()
    with console.status("starting") as status:

        def show(what: str, tokens: int) -> None:
            status.update(f"{what}: {tokens:,} tokens, {time.monotonic() - start:.0f} s")

        yield show


def _ignore(_what: str, _tokens: int) -> None:
    pass
