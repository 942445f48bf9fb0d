"""Runs CPython in bubblewrap containers: without network, with a separate file system, process namespace and user.

    episode threads --(text)--> one container each: process 1 --(fork)--> the code
           |                              ^
           `--(start, end)--> container_starter.py

Containers are started ahead, and each is used for one session only. A container can read only the files that its
command mounts.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import itertools
import os
import platform
import queue
import select
import shutil
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.version import Version

from trimtab.errors import TrimtabError
from trimtab.trainer.processes import WorkerProcess
from trimtab.trainer.sandbox.code_result import GRACE, CodeResult, Limits, took_too_long
from trimtab.trainer.sandbox.container_init import BYTES_PER_CHARACTER, HEADER, HIDDEN, LENGTH, MAX_REPORT, NOBODY
from trimtab.trainer.sandbox.seccomp import ARCHITECTURES, code_filter, container_filter

STARTER = "trimtab.trainer.sandbox.container_starter"
START_ATTEMPTS = 3
READY_TIMEOUT = 90.0  # seconds until a container is ready: the start timeout, and time for the starter process
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

INIT = Path(__file__).with_name("container_init.py")
OLDEST = "0.8"  # the first version with --disable-userns
LIBRARIES = ("/usr/lib", "/usr/lib64", "/lib", "/lib64")
DEVICES = ("/dev/null", "/dev/random", "/dev/urandom")  # not /dev/zero: mapping it gives memory that no limit counts
PYTHON, PACKAGES, SCRIPT = "/python", "/packages", "/container_init.py"  # paths inside the container
DIRECTORIES = ("/dev", "/etc", "/usr", PYTHON, f"{PYTHON}/bin", PACKAGES)  # made with 0755; the default is 0700
ISOLATION = [
    *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try", "--cap-drop", "ALL"),
    *("--die-with-parent", "--new-session", "--as-pid-1", "--clearenv", "--hostname", "sandbox"),
]
# Process 1 has these capabilities at first: to open /proc, and if it is root, to change its user. Then it drops them.
OPEN_PROC = ("--cap-add", "CAP_DAC_READ_SEARCH")
CHANGE_USER = ("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")
USER_NAMESPACE = ("--unshare-user", "--disable-userns", "--uid", str(NOBODY), "--gid", str(NOBODY))
# One thread for each linear algebra library, because containers run beside the trainer.
ENVIRONMENT = {
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONPATH": PACKAGES,
    "LD_LIBRARY_PATH": f"{PYTHON}/lib",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


class Setup(NamedTuple):
    """The first message to the starter: the command and the filter with which it starts every container."""

    command: Sequence[str]
    seccomp: bytes


class ContainerRequest(NamedTuple):
    """A message to the starter."""

    number: int  # of the container
    start: bool  # start the container, or end it


class Started(NamedTuple):
    """A message from the starter: a container is ready (its connection is sent along), or failed to start."""

    number: int  # of the container
    failure: str | None = None  # why it failed


class ContainerError(Exception):
    """A container that did not start, died, or did not answer in time."""


class ContainerTimeout(ContainerError):
    """A container that did not answer in time."""


class Container:
    """A container that runs code. Only lengths and text are read from it.

    Args:
        connection: the connection to process 1 of the container.
        end: ends the processes of the container.
    """

    def __init__(self, connection: socket.socket, end: Callable[[], None]) -> None:
        self._connection = connection
        self._end = end

    def alive(self) -> bool:
        """Whether the container is alive. It sends nothing between two runs, so readable means ended."""
        poll = select.poll()  # `select.select` accepts no descriptor above 1023
        poll.register(self._connection, select.POLLIN)
        return not poll.poll(0)

    def run(self, code: str, limits: Limits) -> CodeResult:
        """Runs the code. If the result is `lost`, the container has ended.

        Raises `ContainerError` if the container dies, hangs or violates the protocol.
        """
        deadline = time.monotonic() + limits.timeout + GRACE
        text = code.encode()
        try:
            self._connection.settimeout(limits.timeout + GRACE)
            self._connection.sendall(LENGTH.pack(len(text)) + text)
            timed_out, ended, output_size, error_size = HEADER.unpack(self._receive(HEADER.size, deadline))
            if output_size > limits.max_output * BYTES_PER_CHARACTER or error_size > MAX_REPORT:
                raise ContainerError("the sandbox broke its protocol")
            output = self._receive(output_size, deadline).decode(errors="replace")
            error = self._receive(error_size, deadline).decode(errors="replace")
        except TimeoutError:
            raise ContainerTimeout(took_too_long(limits)) from None
        except OSError:
            raise ContainerError("the process of this sandbox was killed (by hand, or for lack of memory)") from None
        return CodeResult(output, error or None, bool(timed_out), bool(ended))

    def kill(self) -> None:
        """Ends all processes of the container. A `run` in progress in another thread raises."""
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
                return CodeResult("", f"the sandbox could not be started: {error}")
            kept = False
            try:
                result = container.run(code, self._limits)
                kept = not result.lost
                return result
            except ContainerError as error:
                return CodeResult("", str(error), isinstance(error, ContainerTimeout), lost=True)
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
    """Containers that are ready, and the starter process that starts them. It is restarted if it dies."""

    def __init__(self, setup: Setup, *, count: int) -> None:
        self._setup = setup
        self._count = count
        self._lock = threading.Lock()
        self._process: WorkerProcess | None = None
        self._closed = False
        self._numbers = itertools.count()
        self._missing: set[int] = set()  # containers that were requested and are not ready yet
        self._ready: queue.SimpleQueue[tuple[int, Container | ContainerError]] = queue.SimpleQueue()

    def fill(self) -> None:
        """Requests containers until `count` of them are ready or starting."""
        with self._lock:
            while self._ready.qsize() + len(self._missing) < self._count:
                self._request()

    def _request(self) -> None:
        number = next(self._numbers)
        if self._closed:
            self._ready.put((number, ContainerError("it was closed")))
            return
        if self._process is None:
            try:
                self._process = self._start()
            except OSError as error:  # a limit of processes or open files was reached
                self._ready.put((number, ContainerError(str(error))))
                return
        self._missing.add(number)
        self._send(self._process, ContainerRequest(number, start=True))

    def _start(self) -> WorkerProcess:
        process = WorkerProcess(STARTER)
        with contextlib.suppress(OSError):  # the process died already: `_receive` notices that
            process.send(self._setup)
        threading.Thread(target=self._receive, args=(process,), daemon=True).start()
        return process

    def take(self) -> Container:
        """Returns a container that is ready. Raises `ContainerError` if none can be started."""
        failures, first = 0, next(self._numbers)
        while True:
            self.fill()  # an interrupted caller may have taken the last container
            try:
                number, container = self._ready.get(timeout=READY_TIMEOUT)
            except queue.Empty:
                raise ContainerError(f"none was ready within {READY_TIMEOUT:g} s") from None
            self.fill()
            if isinstance(container, Container):
                if container.alive():
                    return container
                container.kill()  # it died while it was idle
            elif number > first:  # containers with lower numbers failed earlier; the reason may no longer exist
                failures += 1
                if failures == START_ATTEMPTS:
                    raise container

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.kill()

    def _receive(self, process: WorkerProcess) -> None:
        """Receives the messages of a starter process. Runs in a thread until the process ends."""
        works = False
        with contextlib.suppress(EOFError, OSError):
            while True:
                message = process.receive()
                assert message is not None, "this process sends no heartbeats"
                started: Started = message.content
                with self._lock:
                    self._missing.discard(started.number)
                if message.descriptor is None:
                    self._end(process, started.number)
                    self._ready.put((started.number, ContainerError(_explain(started.failure or ""))))
                else:
                    end = functools.partial(self._end, process, started.number)
                    self._ready.put((started.number, Container(socket.socket(fileno=message.descriptor), end)))
                    works = True
        process.kill()
        with self._lock:
            if self._process is not process:
                return
            self._process = None
            missing = len(self._missing)
            self._missing.clear()
            for _ in range(missing):
                if works:
                    self._request()  # starts a new process
                else:
                    error = ContainerError(f"the process that starts it {process.exit_reason()}")
                    self._ready.put((next(self._numbers), error))

    def _end(self, process: WorkerProcess, number: int) -> None:
        with self._lock:
            self._send(process, ContainerRequest(number, start=False))

    def _send(self, process: WorkerProcess, request: ContainerRequest) -> None:
        with contextlib.suppress(OSError):  # the process died, and its containers with it
            process.send(request)


def _explain(failure: str) -> str:
    if not any(sign in failure for sign in NO_NAMESPACES):
        return failure
    return f"{failure} ({ROOT_WITHOUT_RIGHTS if os.geteuid() == 0 else ALLOW_NAMESPACES})"


def container_command(limits: Limits, packages: Sequence[str]) -> list[str]:
    """Returns the command line of `bwrap`, without the option `--seccomp`."""
    program = shutil.which("bwrap")
    if program is None:
        raise TrimtabError('the sandbox "bubblewrap" needs a program that is not installed: apt install bubblewrap')
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout.split()[-1:]
    if not version or Version(version[0]) < Version(OLDEST):
        installed = version[0] if version else "unknown"
        raise TrimtabError(f"bubblewrap {installed} is older than {OLDEST}: apt install a newer bubblewrap")
    distributions = [_distribution(name) for name in packages]
    modules = [module for distribution in distributions for module in _modules(distribution)]
    return [
        *(program, *ISOLATION, *OPEN_PROC, *(CHANGE_USER if os.geteuid() == 0 else USER_NAMESPACE)),
        *(word for name, value in ENVIRONMENT.items() for word in ("--setenv", name, value)),
        *(word for path in DIRECTORIES for word in ("--perms", "0755", "--dir", path)),
        *_system(),
        *_interpreter(),
        *(word for path, name in _files(distributions) for word in ("--ro-bind", str(path), f"{PACKAGES}/{name}")),
        *("--ro-bind", str(INIT), SCRIPT),
        *("--perms", "0000", "--dir", HIDDEN, "--proc", f"{HIDDEN}/proc", "--remount-ro", f"{HIDDEN}/proc"),
        *("--perms", "1777", "--size", str(limits.memory_mb << 20), "--tmpfs", "/tmp", "--chdir", "/tmp"),
        *("--remount-ro", "/"),
        *("--", f"{PYTHON}/bin/python", "-s", "-S", "-B", "-P", "-X", "utf8", SCRIPT),
        *(str(limits.timeout), str(limits.memory_mb), str(limits.max_output)),
        *(code_filter(platform.machine()).hex(), *modules),
    ]


def _system() -> Iterator[str]:
    for library in LIBRARIES:
        if os.path.islink(library):
            yield from ("--symlink", os.readlink(library), library)
        elif os.path.isdir(library):
            yield from ("--ro-bind", library, library)
    yield from ("--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache")
    for device in DEVICES:
        yield from ("--dev-bind", device, device)


def _interpreter() -> Iterator[str]:
    """Yields options that mount this interpreter with its standard library, without the installed packages."""
    standard = Path(sysconfig.get_path("stdlib"))
    library = standard.parent
    yield from ("--ro-bind", os.path.realpath(sys.executable), f"{PYTHON}/bin/python")
    yield from ("--ro-bind", str(library), f"{PYTHON}/{library.name}")
    if (standard / "site-packages").is_dir():
        hidden = f"{PYTHON}/{library.name}/{standard.name}/site-packages"
        yield from ("--tmpfs", hidden, "--remount-ro", hidden)


def _distribution(name: str) -> importlib.metadata.Distribution:
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        raise TrimtabError(f"the package {name!r} for the sandbox is not installed: pip install {name}") from None
    if not _modules(distribution):
        raise TrimtabError(f"the package {name!r} has no files (an editable install?): pip install {name}")
    return distribution


def _modules(distribution: importlib.metadata.Distribution) -> list[str]:
    """Returns the names of the packages that a distribution installs, or of its modules if it has no package."""
    files = [file for file in distribution.files or () if file.parts[0] != ".."]
    names = {file.parts[0] for file in files if len(file.parts) == 2 and file.name == "__init__.py"}
    return sorted(names or {file.stem for file in files if len(file.parts) == 1 and file.suffix == ".py"})


def _files(distributions: Sequence[importlib.metadata.Distribution]) -> list[tuple[Path, str]]:
    """Returns the paths of the distributions and their dependencies, each with its name in `site-packages`."""
    waiting, seen = list(distributions), {distribution.name for distribution in distributions}
    paths: dict[str, Path] = {}
    while waiting:
        distribution = waiting.pop()
        for name in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            paths.setdefault(name, Path(str(distribution.locate_file(name))))
        for line in distribution.requires or ():
            requirement = Requirement(line)
            wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if wanted and requirement.name not in seen:
                seen.add(requirement.name)
                waiting.append(_distribution(requirement.name))
    return sorted((path, name) for name, path in paths.items() if path.exists())
