"""Entry point of the command line: registers the commands and prints user errors as one line.

This module does not import torch, so that `trimtab --help` is fast.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from trimtab.cli import starting
from trimtab.cli.check_loss import check_loss
from trimtab.cli.compare import compare
from trimtab.cli.describe import explain, recipes, show
from trimtab.cli.diagnose import diagnose, rescore
from trimtab.cli.doctor import doctor
from trimtab.cli.evaluate import evaluate
from trimtab.cli.output import Command, echo
from trimtab.cli.preflight import preflight
from trimtab.cli.report import report
from trimtab.cli.starting import COMMANDS, CommandFacts
from trimtab.cli.train import export, sft, train
from trimtab.errors import DivergedError, Stopped, TrimtabError, TrimtabWarning
from trimtab.plugins import only_named
from trimtab.text import clean, without_credentials

EXIT_USER_ERROR, EXIT_DIVERGED = 2, 3
# Some typer releases bundle a copy of click, so the class is found through a public subclass, not by `import click`.
USAGE_ERROR: type[Exception] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


class Interrupted(Exception):
    """Replaces the `KeyboardInterrupt` of Ctrl-C or SIGTERM, which typer would handle; `code` is the exit code."""

    def __init__(self, stop: KeyboardInterrupt) -> None:
        super().__init__(str(stop))
        cause: BaseException | None = stop
        while cause is not None and not isinstance(cause, Stopped):
            cause = cause.__context__
        self.code = 128 + (signal.SIGINT if cause is None else cause.signal)


class Commands(TyperGroup):
    """The group of all commands. Passes Ctrl-C on to `run`, with any typer release."""

    def invoke(self, ctx: Any) -> Any:
        try:
            starting.release()
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            raise Interrupted(stop) from None
        except BrokenPipeError:  # the reader, such as `head`, closed the pipe; exit code 1 would mean a failed check
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115  for what is flushed at exit
            raise typer.Exit(128 + signal.SIGPIPE) from None


app = typer.Typer(
    name="trimtab",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start here: [bold]trimtab train quickstart[/bold]",
)


def _version(is_requested: bool) -> None:
    if is_requested:
        echo(f"trimtab {importlib.metadata.version('trimtab')}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001  # handled by its callback
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Stable reinforcement learning of language models when the data is off-policy."""
    facts = COMMANDS.get(str(context.invoked_subcommand), CommandFacts(one_process=False))
    if not facts.runs_code:
        context.with_resource(only_named(named_functions(context.obj)))
    # Checking the variable first avoids importing torch.
    if facts.one_process and "WORLD_SIZE" in os.environ:
        from trimtab.trainer.ranks import launched_by_torchrun

        if launched_by_torchrun():
            raise TrimtabError(
                f"`trimtab {context.invoked_subcommand}` is one process: run it without torchrun (or unset WORLD_SIZE)"
            )


FUNCTIONS = (
    *(train, sft, export, recipes, show, explain, evaluate, diagnose),
    *(rescore, preflight, check_loss, report, compare, doctor),
)
for function in FUNCTIONS:
    name = "eval" if function is evaluate else function.__name__.replace("_", "-")
    app.command(name, cls=Command, epilog=f"Example: {COMMANDS[name].example}")(function)


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code.

    0: success. 1: a check or a run failed. 2: a user error. 3: the policy diverged or its guard gave up (the same
    command would fail again). 128 + n: stopped by signal n. Any other exception is a bug and propagates.
    """
    try:
        result = typer.main.get_command(app).main(
            list(arguments), prog_name="trimtab", standalone_mode=False, obj=arguments
        )
    except USAGE_ERROR as error:
        if message := _usage_message(error):
            echo(_one_line(message), err=True)
        return EXIT_USER_ERROR
    except TrimtabError as error:
        echo(_one_line(str(error)), err=True)
        return EXIT_DIVERGED if isinstance(error, DivergedError) else EXIT_USER_ERROR
    except Interrupted as stop:
        echo(f"\ntrimtab: interrupted{f'; {stop}' if str(stop) else ''}", err=True)
        return stop.code
    return result if isinstance(result, int) else 0


def named_functions(arguments: Sequence[str]) -> set[str]:
    """Returns all `module:function` names in a command line, also if keywords follow (`module:function:tau=0.1`)."""
    return {name for argument in arguments for name in re.findall(r"[\w.]+:\w+", argument)}


def _usage_message(error: Any) -> str:
    """Returns one line that describes a usage error and names the command that shows help."""
    message = error.format_message().strip().rstrip(".")
    if not message:  # `trimtab` alone: the parser has already printed the help
        return ""
    command = error.ctx.command_path if getattr(error, "ctx", None) is not None else "trimtab"
    return f"{message} (see: {command} --help)"


def _one_line(text: str) -> str:
    return f"trimtab: {without_credentials(' '.join(text.split()))}"


def _format_warning(message: Warning | str, category: type[Warning], file: str, line: int, *_: Any) -> str:
    """Returns one line for a warning; warnings of other packages include the file and the line number."""
    if issubclass(category, TrimtabWarning):
        return f"{clean(_one_line(f'warning: {message}'))}\n"
    return clean(f"{file}:{line}: {category.__name__}: {message}\n")


def main() -> NoReturn:
    """Run the command line and exit; `trimtab.__main__` is the entry point that calls it."""
    warnings.formatwarning = _format_warning
    sys.excepthook = lambda *bug: echo("".join(traceback.format_exception(*bug)), err=True, nl=False)
    # Otherwise the hub client prints its retries beside the one-line error about a missing model.
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    sys.exit(run(sys.argv[1:]))
