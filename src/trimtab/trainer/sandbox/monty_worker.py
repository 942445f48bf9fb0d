"""The process that runs Monty interpreters for a `MontySandbox`. Results are exchanged as text, never as objects.

A value must not be converted to a Python object: nested lists with 210 references can represent 10^21 elements. The
value of the last expression is therefore printed by the code itself, inside Monty, where memory is limited.
"""

from __future__ import annotations

import ast
import contextlib
import queue
import resource
import sys
import traceback
from dataclasses import replace
from typing import Any

from pydantic_monty import Monty, MontyCrashedError, MontyError, MontyRuntimeError, MontySession, MontySyntaxError

from trimtab.errors import error_text
from trimtab.trainer.processes import Message, Parent
from trimtab.trainer.sandbox.code_result import CodeResult, Limits
from trimtab.trainer.sandbox.monty import SessionRequest

SHOW_VALUE = "_ = ("  # inserted before the last expression
MAX_SESSIONS = 100_000
OVERHEAD_MB = 512  # memory of this process and of an interpreter, in addition to the limit of the code
MAX_LINE = 200  # characters of a source line in a traceback


def main() -> None:
    messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
    parent = Parent(messages.put)
    limits: Limits = messages.get().content
    data = (limits.memory_mb + OVERHEAD_MB) << 20
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_DATA, (data, data))  # the interpreters inherit it
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with Monty(max_processes=MAX_SESSIONS, request_timeout=limits.timeout + 1) as monty:
        interpreters = _Interpreters(monty, limits)
        while True:
            request: SessionRequest = messages.get().content
            if request.code is None:
                interpreters.end(request.session)
            else:
                parent.send(interpreters.run(request.session, request.code))


class _Interpreters:
    """The open sessions; each has an interpreter process."""

    def __init__(self, monty: Monty, limits: Limits) -> None:
        self._monty = monty
        self._limits = limits
        self._open: dict[int, MontySession] = {}

    def run(self, session: int, code: str) -> CodeResult:
        try:
            interpreter = self._open.get(session)
            if interpreter is None:
                interpreter = self._open[session] = self._monty.checkout(
                    limits={"max_feed_duration_secs": self._limits.timeout, "max_memory": self._limits.memory_mb << 20},
                    os_policy={"sleep": "zero"},  # sleeping would only block a worker
                ).__enter__()
        except (MontyError, RuntimeError) as error:
            return CodeResult("", f"the sandbox could not be started: {error}", sandbox_failed=True)
        output, result = _Output(self._limits.max_output), CodeResult("")
        try:
            interpreter.feed_run(showing_value(code), print_callback=output.add)
        except BaseException as error:  # also a panic of the bindings
            result = self._describe_error(error)
        if output.full:
            result = CodeResult("", self._limits.printed_too_much(), lost=True)
        if result.lost:
            self.end(session)
        return replace(result, output=output.text())

    def end(self, session: int) -> None:
        if (interpreter := self._open.pop(session, None)) is not None:
            with contextlib.suppress(MontyError, RuntimeError):  # the process has ended already
                interpreter.__exit__(None, None, None)

    def _describe_error(self, error: BaseException) -> CodeResult:
        """Returns the result of a run that raised, without its output."""
        if isinstance(error, MontySyntaxError) or (isinstance(error, MontyRuntimeError) and error.traceback()):
            return CodeResult("", _format_traceback(error))
        # Without a traceback, the code could not catch the error, and its variables are undefined.
        message = error.display("type-msg") if isinstance(error, MontyRuntimeError) else error_text(error)
        crashed = isinstance(error, MontyCrashedError)
        if message.startswith("TimeoutError") or (crashed and error.timed_out):
            return CodeResult("", self._limits.took_too_long(), timed_out=True, lost=True)
        if crashed:
            killed = "SIGKILL" in str(error)  # not by the code, which has no access to processes
            return CodeResult("", "ended the interpreter's process", lost=True, sandbox_failed=killed)
        if message.startswith("MemoryError"):
            message = self._limits.used_too_much_memory()
        return CodeResult("", message, lost=True)


class _Output:
    """Collects printed text, up to `length` characters."""

    def __init__(self, length: int) -> None:
        self._room = length
        self._parts: list[str] = []
        self.full = False

    def add(self, _stream: str, text: str) -> None:
        self._parts.append(text[: self._room])
        self.full |= len(text) > self._room
        self._room -= len(self._parts[-1])
        if self.full:
            raise OverflowError  # stops the code

    def text(self) -> str:
        return "".join(self._parts)


def showing_value(code: str) -> str:
    """Returns the code, extended to print the value of its last expression if it ends with an expression."""
    try:
        statements = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return f"{code}\nNone"  # Monty reports the error; if it accepts the code, no value is printed
    if not statements or not isinstance(last := statements[-1], ast.Expr):
        return f"{code}\nNone"
    assert last.end_lineno is not None
    assert last.end_col_offset is not None
    lines = code.encode().splitlines(keepends=True)
    start = sum(map(len, lines[: last.lineno - 1])) + last.col_offset
    end = sum(map(len, lines[: last.end_lineno - 1])) + last.end_col_offset
    text = code.encode()
    shown = b"%b%b%b\n)%b" % (text[:start], SHOW_VALUE.encode(), text[start:end], text[end:])
    return f"{shown.decode()}\nif _ is not None: print(repr(_))\nNone"


def _format_traceback(error: MontyRuntimeError | MontySyntaxError) -> str:
    frames: list[Any] = error.traceback()
    summaries = [
        traceback.FrameSummary(
            "<python>",
            frame.line,
            frame.function_name or "<module>",
            lookup_line=False,
            line=(frame.source_line or "").replace(SHOW_VALUE, "", 1)[:MAX_LINE],
        )
        for frame in frames
    ]
    stack = "".join(traceback.StackSummary.from_list(summaries).format())
    return f"Traceback (most recent call last):\n{stack}{error.display('type-msg')}"


if __name__ == "__main__":
    main()
