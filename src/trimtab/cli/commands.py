"""What each command needs and may do, in one table, which is read before any package is imported."""

from __future__ import annotations

from typing import NamedTuple


class CommandFacts(NamedTuple):
    """Facts about one command.

    extra: the extra of pyproject.toml whose packages it needs. one_process: whether ranks of torchrun would repeat it
    and write the same files. runs_code: whether its recipe is a program that the user runs; all others read what others
    may have written, and load only functions that the command line names.
    """

    extra: str = "diagnose"
    one_process: bool = True
    runs_code: bool = False


_PRINTS = CommandFacts(one_process=False)

COMMANDS = {
    "train": CommandFacts("train", one_process=False, runs_code=True),
    "sft": CommandFacts("train", runs_code=True),
    "compare": CommandFacts("train", runs_code=True),
    "eval": CommandFacts("train"),
    "export": CommandFacts("train"),
    "preflight": CommandFacts("train"),
    "rescore": CommandFacts("train"),
    "check-loss": CommandFacts(),
    "diagnose": CommandFacts(),
    "report": CommandFacts(),
    "recipes": _PRINTS,
    "show": _PRINTS,
    "explain": _PRINTS,
    "doctor": _PRINTS,
}
