"""Runs CPython in bubblewrap containers: without network, with a separate file system, process namespace and user.

    episode threads --(text)--> one container each: process 1 --(fork)--> the code
           |                              ^
           `--(start, end)--> container_starter.py

Containers are started ahead, and each is used for one session only. A container can read only the files that its
command (`container_command.py`) mounts.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import platform
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from trimtab.errors import TrimtabError
from trimtab.trainer.processes import WorkerProcess
from trimtab.trainer.sandbox.code_result import GRACE, CodeResult, Limits
from trimtab.trainer.sandbox.container_command import container_command
from trimtab.trainer.sandbox.container_init import BYTES_PER_CHARACTER, HEADER, LENGTH, MAX_REPORT, READY
from trimtab.trainer.sandbox.seccomp import ARCHITECTURES, container_filter

STARTER = "trimtab.trainer.sandbox.container_starter"
START_ATTEMPTS = 3
START_TIMEOUT = 60.0  # seconds in which a container must be ready, with its packages imported
ANSWER_TIMEOUT = 30.0  # seconds in which the starter process must answer


class Setup(NamedTuple):
    """The first message to the starter: the command and the filter with which it starts every container."""

    command: Sequence[str]
    seccomp: bytes


class ContainerRequest(NamedTuple):
    """A message to the starter. It answers a start with the connection to the container, or with a text: the error."""

    number: int  # of the container
    start: bool  # start the container, or end it


class ContainerError(Exception):
    """A container that did not start."""


class Container:
    """A container that runs code. Only lengths and text are read from it.

    connection: the connection to process 1 of the container. number: containers that were started later have higher
    numbers. end: ends the processes of the container.
    """

    def __init__(self, connection: socket.socket, number: int, end: Callable[[], None]) -> None:
        self.number = number
        self._connection = connection
        self._end = end

    def wait_until_ready(self) -> None:
        """Waits until the container can run code. Raises `ContainerError` if it does not start, or ended already."""
        received = bytearray()  # what `bwrap` and process 1 print is an error, unless process 1 becomes ready
        with contextlib.suppress(OSError):  # no answer in time, or the container ended before it read a message
            self._connection.settimeout(START_TIMEOUT)
            while not received.endswith(READY) and (part := self._connection.recv(4096)):
                received += part
        if not received.endswith(READY):
            lines = received.decode(errors="replace").strip().splitlines()
            raise ContainerError(_explain(lines[-1].strip()[:200]) if lines else "it was killed, or took too long")
        poll = select.poll()  # `select.select` accepts no descriptor above 1023
        poll.register(self._connection, select.POLLIN)
        if poll.poll(0):  # it sends nothing before a run, so readable means ended
            raise ContainerError("it was killed")

    def run(self, code: str, limits: Limits) -> CodeResult:
        """Runs the code. If the result is `lost`, the container has ended, hangs, or violated the protocol."""
        deadline = time.monotonic() + limits.timeout + GRACE
        text = code.encode()
        try:
            self._connection.settimeout(limits.timeout + GRACE)
            self._connection.sendall(LENGTH.pack(len(text)) + text)
            timed_out, ended, output_size, error_size = HEADER.unpack(self._receive(HEADER.size, deadline))
            if output_size > limits.max_output * BYTES_PER_CHARACTER or error_size > MAX_REPORT:
                return CodeResult("", "the sandbox broke its protocol", lost=True, sandbox_failed=True)
            output = self._receive(output_size, deadline).decode(errors="replace")
            error = self._receive(error_size, deadline).decode(errors="replace")
        except TimeoutError:
            return CodeResult("", limits.took_too_long(), timed_out=True, lost=True)
        except OSError:
            error = "the process of this sandbox was killed (by hand, or for lack of memory)"
            return CodeResult("", error, lost=True, sandbox_failed=True)
        return CodeResult(output, error or None, bool(timed_out), bool(ended))

    def kill(self) -> None:
        """Ends all processes of the container. The result of a `run` in progress in another thread is `lost`."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._end()

    def _receive(self, size: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            self._connection.settimeout(max(1e-3, deadline - time.monotonic()))
            part = self._connection.recv(size - len(data))
            if not part:
                raise ConnectionResetError
            data += part
        return bytes(data)


# Messages of bubblewrap or process 1 if the kernel refuses namespaces or a change of user, and what to do then.
NO_NAMESPACES = (
    *("No permissions to create", "Creating new namespace failed", "setting up uid map", "user namespaces"),
    *("Operation not permitted", "Invalid argument"),
)
ALLOW_NAMESPACES = (
    "user namespaces are disabled: sysctl -w kernel.unprivileged_userns_clone=1 (Debian), "
    "kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu), user.max_user_namespaces=15000 (others)"
)
ROOT_WITHOUT_RIGHTS = (
    "this process is root in a container that may not make namespaces or change users, as Docker's are by default: "
    'use sandbox = "monty", or start the container with these rights'
)


def _explain(failure: str) -> str:
    if not any(sign in failure for sign in NO_NAMESPACES):
        return failure
    return f"{failure} ({ROOT_WITHOUT_RIGHTS if os.geteuid() == 0 else ALLOW_NAMESPACES})"


class BubblewrapSandbox:
    """Runs code in containers, of which `workers` are started ahead."""

    def __init__(self, limits: Limits, *, workers: int, packages: Sequence[str]) -> None:
        if platform.machine() not in ARCHITECTURES:
            raise TrimtabError('the sandbox "bubblewrap" runs on x86_64 and aarch64 only: use sandbox = "monty"')
        self._limits = limits
        self._running = threading.Semaphore(workers)
        self._sessions: dict[int, Container] = {}
        command = container_command(limits, packages)
        self._starter = _Starter(Setup(command, container_filter(platform.machine())), count=workers)
        self._starter.fill()

    def run(self, session: int, code: str) -> CodeResult:
        with self._running:
            container = self._sessions.pop(session, None)  # put back after it has answered
            try:
                container = container or self._starter.take()
            except ContainerError as error:
                return CodeResult("", f"the sandbox could not be started: {error}", sandbox_failed=True)
            kept = False
            try:
                result = container.run(code, self._limits)
                kept = not result.lost
                return result
            finally:  # also if the caller was interrupted: the next run must not receive the answer to this run
                if kept:
                    self._sessions[session] = container
                else:
                    container.kill()

    def end(self, session: int) -> None:
        if (container := self._sessions.pop(session, None)) is not None:
            container.kill()

    def close(self) -> None:
        self._starter.close()


class _Starter:
    """Containers that were started ahead, and the process that starts them, which is restarted if it dies."""

    def __init__(self, setup: Setup, *, count: int) -> None:
        self._setup = setup
        self._count = count
        self._lock = threading.Lock()
        self._process: WorkerProcess | None = None
        self._closed = False
        self._numbers = itertools.count()
        self._ahead: deque[Container] = deque()

    def fill(self) -> None:
        """Starts containers until there are `count` ahead. If that fails, the next `take` raises the error."""
        with self._lock, contextlib.suppress(ContainerError):
            while len(self._ahead) < self._count:
                self._ahead.append(self._start())

    def take(self) -> Container:
        """Returns a container that is ready. Raises `ContainerError` if none can be started."""
        failures, first = 0, next(self._numbers)
        while True:
            container = None
            try:
                with self._lock:
                    container = self._ahead.popleft() if self._ahead else self._start()
                self.fill()
                container.wait_until_ready()
                return container
            except ContainerError:
                if container is not None:
                    container.kill()
                # A container that was started earlier may have died since; the reason may no longer exist.
                failures += container is None or container.number > first
                if failures == START_ATTEMPTS:
                    raise

    def close(self) -> None:
        self._closed = True
        if self._process is not None:
            self._process.kill()  # a start in progress fails
        with self._lock:
            if self._process is not None:
                self._process.kill()  # another thread may have replaced it

    def _start(self) -> Container:
        """Starts a container, and first the process that starts containers if there is none."""
        if self._closed:
            raise ContainerError("it was closed")
        number = next(self._numbers)
        try:
            if self._process is None or self._process.process.poll() is not None:  # there is none yet, or it died
                self._process = WorkerProcess(STARTER)
                self._process.send(self._setup)
            process = self._process
            process.send(ContainerRequest(number, start=True))
            message = process.receive(ANSWER_TIMEOUT)
        except BaseException as error:
            if self._process is not None:  # if the caller was interrupted, an answer may come, but to no later request
                self._process.kill()
            if isinstance(error, EOFError | OSError):  # it died, or a limit of processes or open files was reached
                raise ContainerError(str(error) or "the process that starts it was killed") from None
            raise
        if message is None:
            process.kill()
            raise ContainerError(f"the process that starts it did not answer within {ANSWER_TIMEOUT:g} s")
        if message.descriptor is None:
            raise ContainerError(message.content)
        end = functools.partial(self._end, process, number)
        return Container(socket.socket(fileno=message.descriptor), number, end)

    def _end(self, process: WorkerProcess, number: int) -> None:
        with self._lock, contextlib.suppress(OSError):  # the process died, and its containers with it
            process.send(ContainerRequest(number, start=False))
