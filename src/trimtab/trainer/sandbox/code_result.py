"""The limits and the result of running Python code in a sandbox."""

from __future__ import annotations

from dataclasses import dataclass

MAX_CODE = 100_000  # characters
MAX_ERROR = 2000  # characters of an error; the middle of a longer one is cut out
GRACE = 5.0
"""Seconds after the time limit at which a run is killed. Normally the sandbox itself ends the run at its limit."""
SESSION_LOST = "the variables of this session are lost"


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one run, and the errors that say which of them ended it."""

    timeout: float  # seconds
    memory_mb: int
    max_output: int  # characters

    def took_too_long(self) -> str:
        return f"took longer than {self.timeout:g} s"

    def used_too_much_memory(self) -> str:
        return f"used more than {self.memory_mb} MB of memory"

    def printed_too_much(self) -> str:
        return f"printed more than {self.max_output} characters"


@dataclass(frozen=True, slots=True)
class CodeResult:
    """The result of a run.

    Attributes:
        output: the printed text, and the value of the last expression as the interactive interpreter shows it. Control
            characters are escaped (`\\x1b`).
        error: a traceback, or one line that names the limit that ended the run; None if the code ran to its end.
        timed_out: whether the time limit ended the run.
        lost: whether the variables of the session are lost.
        sandbox_failed: whether `error` is a failure of the sandbox, which the code did not cause.
    """

    output: str
    error: str | None = None
    timed_out: bool = False
    lost: bool = False
    sandbox_failed: bool = False


def shorten(text: str, length: int) -> str:
    """Returns the text; if it is longer than `length` characters, its middle is cut out."""
    if len(text) <= length:
        return text
    return f"{text[: length // 2]}\n[... {len(text) - length} characters ...]\n{text[len(text) - length // 2 :]}"
