"""For all modules: exceptions, warnings and findings. Their one-line texts say what is wrong and what to do."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

# Used in messages if it is not known whether the run has written a checkpoint.
RESUME = "continue with --resume (from the last checkpoint, or from the beginning if none was written)"


class TrimtabError(ValueError):
    """An error that the user can correct. The command line prints it as one line and exits with code 2."""


class DivergedError(TrimtabError):
    """The trained policy has diverged. A single run ends with exit code 3; an experiment records it as a result."""


class GuardStop(TrimtabError):
    """Raised by a `trimtab.Monitor` with `stop_on` to stop the training at a sign of a collapse."""


class EngineDeadError(TrimtabError):
    """An engine died or became unreachable during a call; `Engine.restart` restarts it."""


class Stopped(KeyboardInterrupt):
    """The process was stopped by Ctrl-C or SIGTERM; `signal` is the signal number."""

    def __init__(self, signal: int) -> None:
        super().__init__()
        self.signal = signal


Status = Literal["ok", "note", "fail"]


@dataclass(frozen=True)
class Finding:
    """The result of one check, of an installation (`doctor`), of data (`diagnose`) or of a run."""

    status: Status  # ok, note (may matter) or fail (must be repaired)
    name: str  # what was checked
    detail: str  # what was found
    next_step: str = ""  # what to do about it; empty if nothing

    @property
    def text(self) -> str:
        return f"{self.detail}; {self.next_step}" if self.next_step else self.detail


class TrimtabWarning(UserWarning):
    """A problem that the user should know about and that does not stop the program."""


def did_you_mean(word: str, known: Iterable[str], listing: str = "") -> str:
    """Returns ` (did you mean ...?)` with up to three close words of `known`, or the whole list when none is close.

    listing: text in place of the whole list, such as "`trimtab recipes` lists them".
    """
    names = sorted(set(known))
    close = difflib.get_close_matches(word, names, n=3, cutoff=0.5)
    if close:
        return f" (did you mean {' or '.join(repr(name) for name in close)}?)"
    return f" ({listing or 'known: ' + ', '.join(names)})"


def neighbors(path: Path) -> str:
    """Returns ` (did you mean ...?)` with similarly named files beside a missing path, or an empty string."""
    folder = path.parent
    names = os.listdir(folder) if os.path.isdir(folder) and os.access(folder, os.R_OK) else []
    close = difflib.get_close_matches(path.name, set(names) - {path.name}, n=3, cutoff=0.5)
    return f" (did you mean {' or '.join(str(path.parent / name) for name in close)}?)" if close else ""


def require_distinct(kind: str, names: Sequence[str]) -> None:
    """Raises `TrimtabError` if a name occurs twice; `kind` is what is named."""
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise TrimtabError(f"{kind} {twice!r} is named twice; name each once")


def error_text(error: BaseException) -> str:
    """Returns the type and the text of an exception, or the type alone if there is no text."""
    try:
        text = str(error)
    except Exception:  # the class has a faulty __str__
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def first_line(error: BaseException) -> str:
    """Returns the first line of an exception's text, or its type if the text is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def first_problem(error: ValidationError) -> ErrorDetails:
    """Returns the pydantic problem to report. Unknown names come first: a misspelled name is also missing."""
    return min(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")


def explain(error: ValidationError, known: Iterable[str], word: str = "option") -> str:
    """Returns the first problem in one line. known: the valid names at its place. word: what these names are called."""
    first = first_problem(error)
    name = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"unknown {word} {name!r}{did_you_mean(str(first['loc'][-1]), known)}"
    if first["type"] == "missing":
        return f"{word} {name!r} is missing; give it a value"
    message = first["msg"].removeprefix("Value error, ")
    got = "" if first["type"] == "value_error" else f", got {first['input']!r}"
    return f"{name}: {message}{got}" if name else message
