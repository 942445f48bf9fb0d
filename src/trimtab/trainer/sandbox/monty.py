"""Python code in Monty, an interpreter without access to files, network or processes.

    episode threads --(text)--> one worker process each --(pydantic_monty)--> one interpreter process per session

Monty runs each interpreter in a separate process, but its bindings do work in the process that calls them (they
convert values, they collect output), so they are called in worker processes and not in the threads of a trainer: what
goes wrong there costs a worker.
"""

from __future__ import annotations

import contextlib
import importlib.util
import threading
from typing import NamedTuple

from trimtab.errors import TrimtabError
from trimtab.trainer.processes import WorkerProcess
from trimtab.trainer.sandbox.code_result import GRACE, SESSION_LOST, CodeResult, Limits, took_too_long

WORKER = "trimtab.trainer.sandbox.monty_worker"


class SessionRequest(NamedTuple):
    """Code to run in a session; its answer is a `CodeResult`. No code: the session ends."""

    session: int
    code: str | None


class MontySandbox:
    """Runs code in `workers` processes, started at once."""

    def __init__(self, limits: Limits, *, workers: int) -> None:
        if importlib.util.find_spec("pydantic_monty") is None:
            raise TrimtabError('the sandbox "monty" needs a package that is not installed: pip install pydantic-monty')
        self._workers = [_Worker(limits) for _ in range(workers)]
        self._assigning = threading.Lock()
        self._assigned: dict[int, _Worker] = {}

    def run(self, session: int, code: str) -> CodeResult:
        worker = self._worker(session)
        with worker.lock:
            return worker.run(session, code)

    def end(self, session: int) -> None:
        with self._assigning:
            worker = self._assigned.pop(session, None)
        if worker is not None:
            with worker.lock:
                worker.end(session)

    def close(self) -> None:
        for worker in self._workers:
            worker.close()

    def _worker(self, session: int) -> _Worker:
        """The worker that has the variables of the session, or will have them."""
        with self._assigning:
            worker = self._assigned.get(session)
            if worker is None:
                used = list(self._assigned.values())
                worker = self._assigned[session] = min(self._workers, key=used.count)
            return worker


class _Worker:
    """A worker process, used by one thread at a time and replaced when it dies or hangs."""

    def __init__(self, limits: Limits) -> None:
        self.lock = threading.Lock()
        self._limits = limits
        self._sessions: set[int] = set()  # with variables in the process
        self._lost: set[int] = set()  # whose variables another session's failure took
        self._closed = False
        self._start()

    def run(self, session: int, code: str) -> CodeResult:
        if self.process.process.poll() is not None:  # it was killed while it had nothing to do
            self._restart()
        if session in self._lost:
            self._lost.remove(session)
            return CodeResult("", f"not run: the process of this sandbox was replaced, and {SESSION_LOST}")
        try:
            self.process.send(SessionRequest(session, code))
            message = self.process.receive(self._limits.timeout + GRACE)
        except (EOFError, ConnectionError):
            error = f"the process of this sandbox {self.process.exit_reason()}{self.process.last_output()}"
            return self._replace(session, CodeResult("", error.rstrip(","), lost=True))
        except BaseException:  # the caller gives up: the next run must not receive the answer of this one
            self._restart()
            raise
        if message is None:
            return self._replace(session, CodeResult("", took_too_long(self._limits), timed_out=True, lost=True))
        result: CodeResult = message.content
        if result.lost:
            self._sessions.discard(session)
        else:
            self._sessions.add(session)
        return result

    def end(self, session: int) -> None:
        self._lost.discard(session)
        if session in self._sessions:
            self._sessions.remove(session)
            with contextlib.suppress(OSError):  # it has died, and the session with it: the next run replaces it
                self.process.send(SessionRequest(session, None))

    def close(self) -> None:
        self._closed = True
        self.process.kill()

    def _start(self) -> None:
        self.process = WorkerProcess(WORKER)
        with contextlib.suppress(OSError):  # it has died already: the first run reports that
            self.process.send(self._limits)

    def _replace(self, session: int, result: CodeResult) -> CodeResult:
        self._restart()
        self._lost.discard(session)
        return result

    def _restart(self) -> None:
        """Replaces the process; its sessions learn of it at their next run."""
        self._lost |= self._sessions
        self._sessions.clear()
        self.process.kill()
        self._start()
        if self._closed:  # by another thread, which may have ended the process before this one
            self.process.kill()
