"""Code shared by commands: options, output (text, JSON, aligned pairs), and the default run directory of a recipe."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from trimtab.cli import starting
from trimtab.cli.starting import COMMANDS
from trimtab.errors import TrimtabError
from trimtab.plugins import require_extra
from trimtab.runs.layout import CONFIG
from trimtab.text import UNPRINTABLE, clean, json_value


def complete_recipe(incomplete: str) -> list[str]:
    """Returns shipped recipes for shell completion; if none matches, shells complete file names."""
    from trimtab.trainer.config import recipe_names

    return [name for name in recipe_names() if name.startswith(incomplete)]


Recipe = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="A name from `trimtab recipes`, a .toml file, or a run directory.",
        autocompletion=complete_recipe,
    ),
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one key of the recipe; may be repeated."),
]
AllowCode = Annotated[
    bool,
    typer.Option(
        "--allow-code", help="Import the modules that a recipe or run names, not only those of this command line."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
MULTI_VALUE_OPTIONS = ("--methods", "--regimes", "--lengths", "--arguments")


class Command(TyperCommand):
    """A command that raises an error if a package it needs is missing; its `--help` needs no package.

    The options in `MULTI_VALUE_OPTIONS` take several words: `--methods a b` means `--methods a --methods b`.
    """

    def invoke(self, ctx: Any) -> Any:
        with starting.guarded():  # checking for packages may import some
            require_extra(COMMANDS[ctx.info_name].extra, ctx.command_path)
        return super().invoke(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for option, word in itertools.pairwise([*args, "-"]):
            # An option without a value would be dropped below, and its default would apply silently.
            if option in MULTI_VALUE_OPTIONS and (not word or word.startswith("-")):
                raise TrimtabError(f"{option} names nothing: name at least one, or leave {option} out")
        if "" in args:  # an empty path would mean the current folder
            raise TrimtabError("an argument is empty: leave it out, or set the variable that it comes from")
        expanded: list[str] = []
        option = ""
        for word in args:
            if word.startswith("-"):
                option = word if word in MULTI_VALUE_OPTIONS else ""
                expanded += [] if option else [word]
            else:
                expanded += [option, word] if option else [word]
        return super().parse_args(ctx, expanded)


def echo(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print text with control characters escaped, because it may contain untrusted text.

    All output of the command line goes through this function, `print_json`, or the consoles in
    `trimtab.trainer.display`.
    """
    typer.echo(clean(text), err=err, nl=nl)


@contextmanager
def only_json(as_json: bool) -> Iterator[None]:
    """With `as_json`, redirects standard output to standard error, also for child processes, while the block runs."""
    if not as_json:
        yield
        return
    sys.stdout.flush()
    saved_stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stdout.flush()
        os.dup2(saved_stdout, 1)
        os.close(saved_stdout)


def print_json(value: Mapping[str, Any]) -> None:
    """Print one JSON object; numbers that JSON cannot represent (NaN, infinities) become null."""
    text = json.dumps(json_value(value), indent=2, ensure_ascii=False)
    text = UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)  # inside strings only: the value is unchanged
    typer.echo(text)


def print_result(as_json: bool, value: Mapping[str, Any], text: str) -> None:
    """Print the result of a command: `value` as JSON with `--json`, otherwise `text`."""
    if as_json:
        print_json(value)
    else:
        echo(text)


def pairs(values: Mapping[str, Any]) -> str:
    """Returns one line `name  value` for each item, with aligned values."""
    width = max(map(len, values), default=0)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in values.items())


def check_page(path: Path | None, option: str, otherwise: str = "") -> None:
    """Raises `TrimtabError` if `option` names a page whose name is not one, so that no data file is overwritten."""
    if path is not None and path.suffix.lower() not in (".html", ".htm"):
        raise TrimtabError(f"{option} {path} is not a page: give a name that ends in .html{otherwise}")


def run_directory(recipe: str, out: Path | None, configured: str | None) -> Path:
    """Returns the run directory: `--out`, the recipe if it is a run directory, its key `out`, or `runs/<recipe>`."""
    if out is not None:
        return out
    if (Path(recipe) / CONFIG).is_file():
        return Path(recipe)
    if configured is not None:
        return Path(configured)
    path = Path(recipe)
    return Path("runs") / (path.parent.name if path.name == CONFIG and path.parent.name else path.stem)
