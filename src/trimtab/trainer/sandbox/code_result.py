"""The limits of a run of Python code in a sandbox, and its result."""

from __future__ import annotations

from dataclasses import dataclass

MAX_CODE = 100_000  # characters
MAX_ERROR = 2000  # characters of an error, whose middle is cut out
GRACE = 5.0
"""Seconds that a run may take in addition to its time limit, which the sandbox enforces itself, before it is killed."""
SESSION_LOST = "the variables of this session are lost"


@dataclass(frozen=True, slots=True)
class Limits:
    """What one run may use: seconds, megabytes, characters of output."""

    timeout: float
    memory_mb: int
    max_output: int


@dataclass(frozen=True, slots=True)
class CodeResult:
    """The result of a run.

    Attributes:
        output: what the code printed, and the value of a last expression as the interactive interpreter shows it.
            Control characters are escaped (`\\x1b`), so that it can be printed anywhere.
        error: a traceback, or one line that says which limit ended the run; None if the code ran to its end.
        timed_out: whether the time limit ended it.
        lost: whether the variables of its session are lost with it.
    """

    output: str
    error: str | None = None
    timed_out: bool = False
    lost: bool = False


def shorten(text: str, length: int) -> str:
    """Returns the text with its middle cut out if it is longer than `length` characters."""
    if len(text) <= length:
        return text
    return f"{text[: length // 2]}\n[... {len(text) - length} characters ...]\n{text[len(text) - length // 2 :]}"


def took_too_long(limits: Limits) -> str:
    return f"took longer than {limits.timeout:g} s"


def used_too_much_memory(limits: Limits) -> str:
    return f"used more than {limits.memory_mb} MB of memory"


def printed_too_much(limits: Limits) -> str:
    return f"printed more than {limits.max_output} characters"
