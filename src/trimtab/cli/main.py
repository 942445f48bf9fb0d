"""Entry point: registers the commands and prints a user's mistake as one line with exit code 2.

Nothing here imports torch; `trimtab --help` answers at once.
"""

from __future__ import annotations

import importlib.metadata
import os
import signal
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from trimtab.cli import compare, describe, diagnose, doctor, evaluate, plan, report, starting, train
from trimtab.errors import Stopped, TrimtabError

MISTAKE = 2
# What every rank of torchrun would do all over again, into the same files; `train` is the command for several ranks.
ALONE = frozenset({"sft", "eval", "diagnose", "report", "compare", "export"})
# Some typer releases carry their own copy of click: the class is taken from a public child, not from `import click`.
USAGE_ERROR: type[Exception] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


class Interrupted(Exception):
    """Ctrl-C or SIGTERM, caught before the argument parser swallows it; `code` is that of the process."""

    def __init__(self, stop: KeyboardInterrupt) -> None:
        super().__init__(str(stop))
        cause: BaseException | None = stop
        while cause is not None and not isinstance(cause, Stopped):
            cause = cause.__context__
        self.code = 128 + (signal.SIGINT if cause is None else cause.signal)


class Commands(TyperGroup):
    """The group of all commands; lets Ctrl-C reach `run` under every typer release."""

    def invoke(self, ctx: Any) -> Any:
        try:
            starting.release()
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            raise Interrupted(stop) from None


app = typer.Typer(
    name="trimtab",
    cls=Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start here: [bold]trimtab train quickstart[/bold]",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"trimtab {importlib.metadata.version('trimtab')}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001  # its callback acts
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Stable reinforcement learning of language models when the data is off-policy."""
    if context.invoked_subcommand in ALONE and "WORLD_SIZE" in os.environ:  # else torch need not be imported
        from trimtab.training.ranks import several

        if several():
            raise TrimtabError(
                f"`trimtab {context.invoked_subcommand}` is one process: run it without torchrun (or unset WORLD_SIZE)"
            )


for module in (train, describe, evaluate, diagnose, report, compare, plan, doctor):
    module.register(app)


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code: 0, 1 (doctor found a fault), 2 (a mistake), or 128 and the number
    of the signal that stopped it.

    Errors that are not a user's mistake are bugs and keep their traceback.
    """
    try:
        result = typer.main.get_command(app).main(list(arguments), prog_name="trimtab", standalone_mode=False)
    except USAGE_ERROR as error:
        return _complain(_usage_line(error))
    except TrimtabError as error:
        return _complain(str(error))
    except Interrupted as stop:
        print(f"\ntrimtab: interrupted{f'; {stop}' if str(stop) else ''}", file=sys.stderr)
        return stop.code
    return result if isinstance(result, int) else 0


def _usage_line(error: Any) -> str:
    """One line for a wrong command line, with where to look for the right one."""
    message = error.format_message().strip().rstrip(".")
    if not message:  # `trimtab` alone: the parser has already printed the help
        return ""
    place = error.ctx.command_path if getattr(error, "ctx", None) is not None else "trimtab"
    return f"{message} (see: {place} --help)"


def _complain(line: str) -> int:
    if line:
        print(f"trimtab: {' '.join(line.split())}", file=sys.stderr)
    return MISTAKE


def main() -> NoReturn:
    """The console script."""
    # A missing model is one line; without this the hub client writes its retries around it.
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
