"""A pool of sandboxes that run Python code written by a model: isolated, with limits, thread-safe."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, Self, get_args

from trimtab.errors import TrimtabError, did_you_mean
from trimtab.text import clean
from trimtab.trainer.sandbox.code_result import MAX_CODE, MAX_ERROR, CodeResult, Limits, shorten
from trimtab.trainer.sandbox.container_init import NOBODY

if TYPE_CHECKING:
    from trimtab.trainer.sandbox.bubblewrap import BubblewrapSandbox
    from trimtab.trainer.sandbox.monty import MontySandbox

SandboxName = Literal["monty", "bubblewrap"]
# A trivial run and its output in a sandbox that works.
PROBE, PROBE_OUTPUT = "1 + 1", "2\n"


class PythonPool:
    """Runs code in processes that are started ahead. They end at `close`, at garbage collection, or with this process.

        with PythonPool("monty") as pool, pool.session() as session:
            print(session.run("2 ** 10").output)

    Args:
        sandbox: "monty", an interpreter of a subset of Python without access to the machine; "bubblewrap", CPython
            without network and with a separate file system.
        workers: number of concurrent runs; further runs wait. Default: one for each processor, at most 8.
        packages: installed packages that code in "bubblewrap" may import, by their names in `pip`.
        timeout: seconds that a run may take.
        memory_mb: megabytes that a run may use.
        max_output: characters that a run may print.

    Raises:
        TrimtabError: the sandbox cannot run here; the message says what to install.
    """

    def __init__(
        self,
        sandbox: SandboxName = "monty",
        *,
        workers: int | None = None,
        packages: Sequence[str] = (),
        timeout: float = 5.0,
        memory_mb: int = 256,
        max_output: int = 10_000,
    ) -> None:
        self._limits = Limits(timeout, memory_mb, max_output)
        workers = workers or min(8, os.cpu_count() or 1)
        self._sessions = itertools.count()
        self._owner = os.getpid()
        self._sandbox = _start(sandbox, self._limits, workers=workers, packages=packages)
        self._end = weakref.finalize(self, _close, self._sandbox, self._owner)
        with self.session() as session:
            result = session.run(PROBE)
        if result != CodeResult(PROBE_OUTPUT):
            self.close()
            raise TrimtabError(f'the sandbox "{sandbox}" does not work here: {result.error or result.output}')

    def session(self) -> PythonSession:
        """Returns a new session, for the runs of one episode."""
        return PythonSession(self, next(self._sessions))

    def close(self) -> None:
        """Ends all processes. Runs in progress return an error."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, session: int, code: str) -> CodeResult:
        if not self._end.alive:
            raise TrimtabError("the sandbox is closed: run code before `close`")
        if len(code) > MAX_CODE:
            return CodeResult("", f"not run: the code has {len(code)} characters, more than {MAX_CODE}")
        # Unpaired surrogates cannot be encoded.
        result = self._sandbox.run(session, code.encode(errors="replace").decode())
        output, error = clean(result.output), result.error
        if error is None and len(output) > self._limits.max_output:
            error = self._limits.printed_too_much()
        error = None if error is None else shorten(clean(error).strip(), MAX_ERROR)
        return replace(result, output=output[: self._limits.max_output], error=error)


class PythonSession:
    """A session: runs of one episode, one at a time, that share variables."""

    def __init__(self, pool: PythonPool, number: int) -> None:
        self._pool = pool
        self._number = number
        self._running = threading.Lock()
        self._closed = False

    def run(self, code: str) -> CodeResult:
        """Runs the code. Errors of the code and of its process are returned in the result, never raised.

        If the caller interrupts a run (Ctrl-C), the variables of the session are lost.
        """
        if os.getpid() != self._pool._owner:
            raise TrimtabError("this sandbox belongs to the process that made it: make another one after a fork")
        with self._running:
            if self._closed:
                return CodeResult("", "not run: the session is closed", sandbox_failed=True)
            try:
                return self._pool._run(self._number, code)
            except BaseException:  # KeyboardInterrupt in this process: it is unknown whether the code ran
                self._pool._sandbox.end(self._number)
                raise

    def close(self) -> None:
        """Ends the session and frees its variables. Waits for a run that is in progress in another thread."""
        if os.getpid() != self._pool._owner:  # a forked copy of the owner must not end the session
            return
        self._closed = True
        with self._running:
            self._pool._sandbox.end(self._number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def sandbox_unavailable(name: SandboxName) -> str | None:
    """Starts the sandbox. Returns None if it works on this machine, otherwise one line that says what is missing."""
    try:
        PythonPool(name, workers=1).close()
    except TrimtabError as error:
        return str(error)
    return None


def describe_protection(name: SandboxName) -> str:
    """Returns a short description of the interpreter that runs the code, and of its user."""
    if name == "monty":
        return "an interpreter that has no access to files, network or processes"
    user = f"user {NOBODY}" if os.geteuid() == 0 else f"user {os.geteuid()} in a user namespace"
    return f"CPython in bubblewrap as {user}, without network and /proc"


def _start(name: str, limits: Limits, *, workers: int, packages: Sequence[str]) -> MontySandbox | BubblewrapSandbox:
    if name == "monty":
        from trimtab.trainer.sandbox.monty import MontySandbox

        if packages:
            raise TrimtabError(f'"monty" cannot import packages ({", ".join(packages)}): use sandbox = "bubblewrap"')
        return MontySandbox(limits, workers=workers)
    if name == "bubblewrap":
        from trimtab.trainer.sandbox.bubblewrap import BubblewrapSandbox

        return BubblewrapSandbox(limits, workers=workers, packages=packages)
    raise TrimtabError(f"unknown sandbox {name!r}{did_you_mean(name, get_args(SandboxName))}")


def _close(sandbox: MontySandbox | BubblewrapSandbox, owner: int) -> None:
    if os.getpid() == owner:  # a forked copy of the owner must not end the sandbox
        sandbox.close()
