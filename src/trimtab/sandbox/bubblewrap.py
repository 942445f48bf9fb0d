"""CPython in bubblewrap containers: no network, no files of the machine, a process space and a user of their own.

    episode threads --(text)--> one container each: process 1 --(fork)--> the code
           |                              ^
           `--(start, end)--> container_starter.py

Containers are started ahead. A run without variables forks a process in a warm container, which is used again only if
the run has left nothing in it; a session with variables has a container of its own from its first run on.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import queue
import socket
import threading
from collections.abc import Sequence

from trimtab.errors import TrimtabError
from trimtab.processes import WorkerProcess
from trimtab.sandbox.code_result import LOST, CodeResult, Limits
from trimtab.sandbox.container import Container, ContainerError, Request, Setup, Started
from trimtab.sandbox.container_command import container_command
from trimtab.sandbox.seccomp import program

STARTER = "trimtab.sandbox.container_starter"
START_ATTEMPTS = 3
NO_NAMESPACES = ("No permissions to create", "Creating new namespace failed", "setting up uid map", "user namespaces")
ALLOW_NAMESPACES = (
    "user namespaces are disabled: sysctl -w kernel.unprivileged_userns_clone=1 (Debian), "
    "kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu), user.max_user_namespaces=15000 (others)"
)


class BubblewrapSandbox:
    """Runs code in containers, `workers` of them warm."""

    def __init__(self, limits: Limits, *, workers: int, packages: Sequence[str], stateful: bool) -> None:
        seccomp = program()
        if seccomp is None:
            raise TrimtabError('the sandbox "bubblewrap" runs on x86_64 and aarch64 only: use sandbox = "monty"')
        self._limits = limits
        self._stateful = stateful
        self._running = threading.BoundedSemaphore(workers)
        self._sessions: dict[int, Container] = {}  # those with a session's variables
        self._starter = _Starter(Setup(container_command(limits, packages, stateful=stateful), seccomp))
        for _ in range(workers):
            self._starter.request()

    def run(self, session: int, code: str) -> CodeResult:
        with self._running:
            container = self._sessions.get(session)
            try:
                container = container or self._starter.take()
            except ContainerError as error:
                return CodeResult("", f"the sandbox could not be started: {error}")
            try:
                result, usable = container.run(code, self._limits)
            except ContainerError as error:
                result, usable = CodeResult("", str(error), error.timed_out), False
            if not self._stateful:
                if usable:
                    self._starter.give_back(container)
                else:
                    container.kill()
                    self._starter.request()
                return result
            if session not in self._sessions:
                self._sessions[session] = container
                self._starter.request()
            if usable:
                return result
            self.end(session)
            return CodeResult(result.output, f"{result.error}; {LOST}", result.timed_out)

    def end(self, session: int) -> None:
        container = self._sessions.pop(session, None)
        if container is not None:
            container.kill()

    def close(self) -> None:
        self._starter.close()


class _Starter:
    """Ready containers, and the process that starts them, which is started again when it dies."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._lock = threading.Lock()
        self._process: WorkerProcess | None = None
        self._closed = False
        self._numbers = itertools.count()
        self._missing = 0  # containers asked for that have not come
        self._ready: queue.SimpleQueue[Container | ContainerError] = queue.SimpleQueue()

    def request(self) -> None:
        """Asks for one more container."""
        with self._lock:
            if self._closed:
                self._ready.put(ContainerError("it was closed"))
                return
            if self._process is None:
                self._process = WorkerProcess(STARTER)
                with contextlib.suppress(OSError):  # it has died already, which `_receive` notices
                    self._process.send(self._setup)
                threading.Thread(target=self._receive, args=(self._process,), daemon=True).start()
            self._missing += 1
            self._send(self._process, Request(next(self._numbers), start=True))

    def take(self) -> Container:
        """Returns a container that is ready, for which another one must be requested or given back."""
        failure = ContainerError("every container died")
        for _ in range(START_ATTEMPTS):
            container = self._ready.get()
            if isinstance(container, Container):
                if container.alive():
                    return container
                container.kill()
            else:
                failure = container
            self.request()
        raise failure

    def give_back(self, container: Container) -> None:
        self._ready.put(container)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.kill()

    def _receive(self, process: WorkerProcess) -> None:
        """Runs in a thread, as long as the process."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                message = process.receive()
                assert message is not None, "this process sends no heartbeats"
                started: Started = message.content
                with self._lock:
                    self._missing -= 1
                if message.descriptor is None:
                    self._ready.put(ContainerError(_explain(started.failure or "")))
                else:
                    end = functools.partial(self._end, process, started.number)
                    self._ready.put(Container(socket.socket(fileno=message.descriptor), end))
        process.kill()
        with self._lock:
            self._process = None
            for _ in range(self._missing):
                self._ready.put(ContainerError("it was closed" if self._closed else f"it {process.exit_reason()}"))
            self._missing = 0

    def _end(self, process: WorkerProcess, number: int) -> None:
        with self._lock:
            self._send(process, Request(number, start=False))

    def _send(self, process: WorkerProcess, request: Request) -> None:
        with contextlib.suppress(OSError):  # it has died, and its containers with it
            process.send(request)


def _explain(failure: str) -> str:
    advice = f" ({ALLOW_NAMESPACES})" if any(sign in failure for sign in NO_NAMESPACES) else ""
    return f"{failure}{advice}"
