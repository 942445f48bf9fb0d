"""Code that runs before packages are imported: facts about each command, and a clean exit at Ctrl-C."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NamedTuple


class CommandFacts(NamedTuple):
    """Facts about one command."""

    example: str = ""  # the last line of its help
    extra: str = "diagnose"  # the extra of pyproject.toml whose packages it needs
    one_process: bool = True  # refused under torchrun, whose ranks would all write the same files
    # The user runs the recipe like a program, so it may name code. Other commands read files that may be untrusted, and
    # import only functions that the command line names.
    runs_code: bool = False


COMMANDS = {
    "train": CommandFacts(
        "[bold]trimtab train quickstart --set trainer.steps=10 --out runs/short[/bold]",
        "train",
        one_process=False,
        runs_code=True,
    ),
    "sft": CommandFacts("[bold]trimtab sft my-task.toml --out runs/warm[/bold]", "train", runs_code=True),
    "export": CommandFacts("[bold]trimtab export runs/mine my-model[/bold]", "train"),
    "recipes": CommandFacts("[bold]trimtab recipes --json[/bold]", one_process=False),
    "show": CommandFacts("[bold]trimtab show quickstart --set trainer.steps=10[/bold]", one_process=False),
    "explain": CommandFacts(
        "[bold]trimtab explain token-tis:weight_max=1.5[/bold], with --for verl its settings, --code its code",
        one_process=False,
    ),
    "eval": CommandFacts(
        "[bold]trimtab eval smollm2-135m-instruct runs/icepop --task arithmetic --task "
        "file:path=gsm8k-test.jsonl,format=gsm8k,holdout=1 --samples 8 --greedy[/bold]",
        "train",
    ),
    "diagnose": CommandFacts(
        "[bold]trimtab diagnose runs/mine --out mine.html[/bold]. The exit code is 0 whatever is found, 2 when the "
        "files cannot be used; programs read --json."
    ),
    "rescore": CommandFacts(
        "[bold]trimtab rescore runs/mine --model smollm2-135m-instruct --limit 64[/bold].", "train"
    ),
    "preflight": CommandFacts(
        "[bold]trimtab preflight laboratory[/bold]. The exit code is 0 if the pair is fit to train, 1 if a check "
        "fails, 2 if it cannot run.",
        "train",
    ),
    "check-loss": CommandFacts(
        "[bold]trimtab check-loss my_loss.py:grpo_loss --as grpo[/bold]. The exit code is 0 if it is that objective, "
        "1 if it differs, 2 if it cannot be run."
    ),
    "report": CommandFacts("[bold]trimtab report runs/mine[/bold] or [bold]trimtab report runs/a runs/b[/bold]"),
    "compare": CommandFacts(
        "[bold]trimtab compare --methods dapo token-tis --regimes on-policy stale-32 --seeds 3[/bold]",
        "train",
        runs_code=True,
    ),
    "doctor": CommandFacts("[bold]trimtab doctor[/bold]", one_process=False),
}
"""The facts of each command, by name."""


def guard() -> None:
    """Make Ctrl-C exit immediately until `release` is called, unless the program already handles or ignores it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)


def release() -> None:
    """Restore the default handler: Ctrl-C raises `KeyboardInterrupt` again."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def guarded() -> Iterator[None]:
    """Makes Ctrl-C exit immediately during a block of slow imports, in which `KeyboardInterrupt` might be lost."""
    guard()
    try:
        yield
    finally:
        release()


def _exit(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    os.write(2, b"\ntrimtab: interrupted; nothing had been started\n")
    os._exit(128 + number)
