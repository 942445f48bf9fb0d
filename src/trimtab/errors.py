"""Exceptions and warnings for users: one line that says what is wrong and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError

# For messages of places that do not know whether the run has written a checkpoint.
RESUME = "continue with --resume (from the last checkpoint, or from the beginning if none was written)"


class TrimtabError(ValueError):
    """A mistake a user can mend. The command line prints it as one line and exits with code 2."""


class DivergedError(TrimtabError):
    """The trained policy is no longer finite: of a single run a mistake in its settings, of an experiment a result."""


class EngineDeadError(TrimtabError):
    """An engine died or cannot be reached in the middle of its work; `Engine.recover` brings it back."""


class Stopped(KeyboardInterrupt):
    """The work was ended by Ctrl-C or SIGTERM; `signal` is which."""

    def __init__(self, signal: int) -> None:
        super().__init__()
        self.signal = signal


class TrimtabWarning(UserWarning):
    """Something the user should know that does not stop the work."""


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint ` (did you mean ...?)` naming the closest known words, or the whole list when none is close."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=3, cutoff=0.5)
    if close:
        return f" (did you mean {' or '.join(repr(name) for name in close)}?)"
    return f" (known: {', '.join(names)})"


def explain(error: ValidationError, known: Iterable[str]) -> str:
    """The first problem pydantic found with the options of a named part, in one line; `known` are its options."""
    # A misspelt option first: the one it stands for would else be said to be missing.
    first = min(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    place = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"unknown option {place!r}{nearest(place, known)}"
    if first["type"] == "missing":
        return f"option {place!r} is missing; give it a value"
    message = first["msg"].removeprefix("Value error, ")
    return f"{place}: {message}, got {first['input']!r}" if place else message
