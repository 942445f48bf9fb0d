"""CPython in bubblewrap containers: no network, no files of the machine, a process space and a user of their own.

    episode threads --(text)--> one container each: process 1 --(fork)--> the code

Containers are started ahead, by one thread that lives as long as they do: the kernel ends a container when the thread
that started it ends, so they end with this process, however that ends. A run without variables forks a process in a
warm container, which is used again only if the run has left nothing in it; a session with variables has a container
of its own from its first run on.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence

from trimtab.errors import TrimtabError
from trimtab.sandbox.code_result import LOST, CodeResult, Limits, took_too_long
from trimtab.sandbox.container_command import container_command
from trimtab.sandbox.container_init import BYTES_PER_CHARACTER, HEADER, LENGTH, MAX_ERROR
from trimtab.sandbox.seccomp import program

START_TIMEOUT = 60.0  # seconds in which a container must be ready, its packages imported
START_ATTEMPTS = 3
GRACE = 5.0  # seconds a container may take in addition to the time limit, which it enforces itself
NO_NAMESPACES = (
    "No permissions to create",
    "Creating new namespace failed",
    "setting up uid map",
    "max_user_namespaces",
)
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
        self._seccomp = seccomp
        self._command = container_command(limits, packages, stateful=stateful)
        self._limits = limits
        self._stateful = stateful
        self._running = threading.BoundedSemaphore(workers)
        self._lock = threading.Lock()
        self._closed = False
        self._containers: set[Container] = set()  # all that were started
        self._sessions: dict[int, Container] = {}  # those with a session's variables
        self._idle: queue.SimpleQueue[Container | OSError | None] = queue.SimpleQueue()
        self._wanted: queue.SimpleQueue[bool] = queue.SimpleQueue()
        for _ in range(workers):
            self._wanted.put(True)
        self._starter = threading.Thread(target=self._start_containers, daemon=True)
        self._starter.start()

    def run(self, session: int, code: str) -> CodeResult:
        with self._running:
            container = self._sessions.get(session)
            if container is None:
                try:
                    container = self._take()
                except ContainerError as error:
                    return CodeResult("", f"the sandbox could not be started: {error}")
            try:
                result, usable = container.run(code, self._limits)
            except ContainerError as error:
                result, usable = CodeResult("", str(error), error.timed_out), False
            if self._stateful and usable:
                if self._sessions.get(session) is None:
                    self._sessions[session] = container
                    self._wanted.put(True)
            elif usable:
                self._idle.put(container)
            else:
                had_variables = self._sessions.pop(session, None) is not None
                self._discard(container)
                if not had_variables:
                    self._wanted.put(True)
            if self._stateful and not usable:
                return CodeResult(result.output, f"{result.error}; {LOST}", result.timed_out)
            return result

    def end(self, session: int) -> None:
        container = self._sessions.pop(session, None)
        if container is not None:
            self._discard(container)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            containers = list(self._containers)
        for container in containers:
            container.kill()
        self._wanted.put(False)
        self._idle.put(None)
        self._starter.join()

    def _take(self) -> Container:
        """Returns a container that is ready."""
        failure = ContainerError("it was closed")
        for _ in range(START_ATTEMPTS):
            container = self._idle.get()
            if container is None:
                self._idle.put(None)  # for other threads that wait
                break
            try:
                if isinstance(container, OSError):
                    raise ContainerError(str(container))
                container.wait_until_ready()
                return container
            except ContainerError as error:
                failure = error
            if isinstance(container, Container):
                self._discard(container)
            self._wanted.put(True)
        raise failure

    def _discard(self, container: Container) -> None:
        with self._lock:
            self._containers.discard(container)
        container.kill()

    def _start_containers(self) -> None:
        while self._wanted.get():
            try:
                container = Container(self._command, self._seccomp)
            except OSError as error:  # the machine has no process or file left to give
                self._idle.put(error)
                continue
            with self._lock:
                self._containers.add(container)
                closed = self._closed
            if closed:
                container.kill()
            self._idle.put(container)


class ContainerError(Exception):
    """A container that did not start, died, or did not answer in time."""

    def __init__(self, message: str, *, timed_out: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out


class Container:
    """A running container. What comes out of it is lengths and text, whatever happens inside."""

    def __init__(self, command: Sequence[str], seccomp: bytes) -> None:
        self._ready = False
        self._connection, inside = socket.socketpair()
        reading, writing = os.pipe()
        os.write(writing, seccomp)
        os.close(writing)
        with tempfile.TemporaryFile() as file:
            self._output = os.dup(file.fileno())  # of bubblewrap and process 1, which say here why they fail
        weakref.finalize(self, os.close, self._output)
        try:
            self._process = subprocess.Popen(
                [command[0], "--seccomp", str(reading), *command[1:]],
                stdin=inside.fileno(),
                stdout=self._output,
                stderr=self._output,
                pass_fds=[reading],
                env={},
            )
        finally:
            os.close(reading)
            inside.close()

    def wait_until_ready(self) -> None:
        if not self._ready:
            self._receive(HEADER.size, time.monotonic() + START_TIMEOUT)
            self._ready = True

    def run(self, code: str, limits: Limits) -> tuple[CodeResult, bool]:
        """Returns the result, and whether the container can be used again."""
        deadline = time.monotonic() + limits.timeout + GRACE
        text = code.encode()
        try:
            self._connection.settimeout(limits.timeout + GRACE)
            self._connection.sendall(LENGTH.pack(len(text)) + text)
            header = self._receive(HEADER.size, deadline)
            timed_out, unusable, output_size, error_size = HEADER.unpack(header)
            if output_size > limits.max_output * BYTES_PER_CHARACTER or error_size > MAX_ERROR:
                raise ContainerError("the sandbox broke its protocol")
            output = self._receive(output_size, deadline).decode(errors="replace")
            error = self._receive(error_size, deadline).decode(errors="replace")
        except TimeoutError:
            raise ContainerError(took_too_long(limits), timed_out=True) from None
        except OSError:
            raise ContainerError(self._death()) from None
        return CodeResult(output, error or None, bool(timed_out)), not unusable

    def kill(self) -> None:
        """Ends all processes of the container. `run` in another thread then raises."""
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _receive(self, size: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            self._connection.settimeout(max(1e-3, deadline - time.monotonic()))
            try:
                part = self._connection.recv(size - len(data))
            except TimeoutError:
                raise ContainerError("it did not answer in time", timed_out=True) from None
            except OSError:
                part = b""
            if not part:
                raise ContainerError(self._death())
            data += part
        return bytes(data)

    def _death(self) -> str:
        lines = os.pread(self._output, 4096, 0).decode(errors="replace").strip().splitlines()
        if not lines:
            return "the process of this sandbox was killed (by hand, or because memory ran out)"
        advice = f" ({ALLOW_NAMESPACES})" if any(sign in lines[-1] for sign in NO_NAMESPACES) else ""
        return f"{lines[-1].strip()[:200]}{advice}"
