"""Runs Python code in Monty, an interpreter without access to files, network or processes.

    episode threads --(text)--> one worker process each --(pydantic_monty)--> one interpreter process per session

Monty runs each interpreter in a separate process. Its bindings convert values and collect output in the process that
calls them, so they are called in worker processes instead of the trainer: a failure then only costs a worker.
"""

from __future__ import annotations

import contextlib
import importlib.util
import signal
import threading
from typing import NamedTuple

from trimtab.errors import TrimtabError
from trimtab.trainer.processes import WorkerProcess
from trimtab.trainer.sandbox.code_result import GRACE, SESSION_LOST, CodeResult, Limits

WORKER = "trimtab.trainer.sandbox.monty_worker"
CRASHES = (-signal.SIGABRT, -signal.SIGBUS, -signal.SIGILL, -signal.SIGSEGV)  # of a worker, which code can cause


class SessionRequest(NamedTuple):
    """Code to run in a session; the answer is a `CodeResult`."""

    session: int
    code: str | None  # None ends the session


class MontySandbox:
    """Runs code in `workers` processes, which the constructor starts."""

    def __init__(self, limits: Limits, *, workers: int) -> None:
        if importlib.util.find_spec("pydantic_monty") is None:
            raise TrimtabError('the sandbox "monty" needs a package that is not installed: pip install pydantic-monty')
        self._workers = [_Worker(limits) for _ in range(workers)]
        self._assigning = threading.Lock()
        self._assigned: dict[int, _Worker] = {}

    def run(self, session: int, code: str) -> CodeResult:
        with self._assigning:
            if session not in self._assigned:  # give it to the worker with the fewest sessions
                used = list(self._assigned.values())
                self._assigned[session] = min(self._workers, key=used.count)
            worker = self._assigned[session]
        with worker.lock:
            try:
                return worker.run(session, code)
            except OSError as error:  # no process to replace a dead one: a limit of processes or open files was reached
                return CodeResult("", f"the sandbox could not be started: {error}", lost=True, sandbox_failed=True)

    def end(self, session: int) -> None:
        with self._assigning:
            worker = self._assigned.pop(session, None)
        if worker is not None:
            with worker.lock:
                worker.end(session)

    def close(self) -> None:
        for worker in self._workers:
            worker.close()


class _Worker:
    """A worker process, used by one thread at a time and replaced if it dies or hangs."""

    def __init__(self, limits: Limits) -> None:
        self.lock = threading.Lock()
        self._limits = limits
        self._holders: dict[int, WorkerProcess] = {}  # the process that holds or held the variables of a session
        self._closed = False
        self._start()

    def run(self, session: int, code: str) -> CodeResult:
        if self.process.process.poll() is not None:  # it was killed while it was idle
            self._restart()
        if self._holders.pop(session, self.process) is not self.process:
            error = f"not run: the process of this sandbox was replaced, and {SESSION_LOST}"
            return CodeResult("", error, sandbox_failed=True)
        try:
            self.process.send(SessionRequest(session, code))
            message = self.process.receive(self._limits.timeout + GRACE)
        except (EOFError, OSError) as error:
            reason = f"the process of this sandbox {self.process.exit_reason(error)}{self.process.last_output()}"
            failed = self.process.process.returncode not in CRASHES
            self._restart()
            return CodeResult("", reason.rstrip(","), lost=True, sandbox_failed=failed)
        except BaseException:  # the caller was interrupted: the next run must not receive the answer to this run
            self._restart()
            raise
        if message is None:
            self._restart()
            return CodeResult("", self._limits.took_too_long(), timed_out=True, lost=True)
        result: CodeResult = message.content
        if not result.lost:
            self._holders[session] = self.process
        return result

    def end(self, session: int) -> None:
        if self._holders.pop(session, None) is self.process:
            with contextlib.suppress(OSError):  # the process died, and the session with it: the next run replaces it
                self.process.send(SessionRequest(session, None))

    def close(self) -> None:
        self._closed = True
        self.process.kill()

    def _start(self) -> None:
        self.process = WorkerProcess(WORKER)
        with contextlib.suppress(OSError):  # the process died already: the first run reports that
            self.process.send(self._limits)

    def _restart(self) -> None:
        """Replaces the process. The next run of each of its other sessions reports that the variables are lost."""
        self.process.kill()
        self._start()
        if self._closed:  # another thread closed the worker and may have killed the old process only
            self.process.kill()
