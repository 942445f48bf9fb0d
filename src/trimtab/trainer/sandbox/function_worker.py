"""A worker process that calls reward functions: its handle in the supervisor, its loop, and their messages."""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import resource
import signal
import socket
import struct
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from trimtab.errors import TrimtabError, error_text
from trimtab.trainer.processes import signal_name
from trimtab.types import MAX_REWARD

Function = Callable[..., Any]
LONGEST = 2e6  # seconds: the operating system counts the milliseconds of a wait in 32 bits
LONGEST_ANSWER = 1 << 16  # bytes, with its header
GRACE = 1.0  # seconds in which a process must end before it is killed
HEADER = struct.Struct("!Q")


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finite value, or an error message."""

    value: float | None = None
    error: str | None = None


def checked(value: Any) -> Outcome:
    """Returns the outcome of a returned value: a usable reward, or the error that says what it is instead."""
    if not isinstance(value, Real | np.bool_):
        return Outcome(error=f"returned {type(value).__name__}, not a number")
    number = float(value)
    if not math.isfinite(number):
        return Outcome(error=f"returned {number}, not a finite number")
    return Outcome(number) if abs(number) <= MAX_REWARD else Outcome(error=f"returned {number}, above {MAX_REWARD:g}")


def describe(error: BaseException) -> str:
    """Returns the type and the text of an exception in one line, short enough for a log."""
    return f"raised {' '.join(error_text(error).split())[:250]}"


class Worker:
    """The supervisor's handle of a forked process that answers one call at a time."""

    def __init__(self, functions: list[Function], memory: int, foreign: list[socket.socket]) -> None:
        self.pipe, remote = socket.socketpair()
        self.position: int | None = None
        self.deadline = math.inf
        self.timeout = math.inf
        self.number = 0
        self.received = b""
        self.alive = True
        parent = os.getpid()
        self.pid = fork()
        if self.pid == 0:
            for inherited in [self.pipe, *foreign]:
                inherited.close()
            never_return(lambda: _work(remote, functions, memory, parent))
        remote.close()

    def is_silent(self) -> bool:
        """Whether it lives and has sent nothing since its last answer."""
        try:
            self.pipe.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def begin(self, position: int, request: dict[str, Any]) -> None:
        self.position, self.timeout = position, request["timeout"]
        self.deadline = time.monotonic() + self.timeout
        self.number = random_number()
        self.received = b""
        self.pipe.settimeout(min(LONGEST, self.timeout))  # a stopped worker reads nothing
        with contextlib.suppress(OSError):  # it has died or stopped: seen as the end of its pipe or at its deadline
            send(self.pipe, {"number": self.number, **{key: request[key] for key in ("function", "arguments")}})
        self.pipe.setblocking(False)

    def answer(self) -> dict[str, Any] | None:
        """Returns the answer or the error in its place; None while bytes of it are missing."""
        try:
            arrived = self.pipe.recv(LONGEST_ANSWER)
        except OSError:
            arrived = b""
        if not arrived:
            self.alive = False
            return {"error": f"ended its process ({self._ending()})"}
        self.received += arrived
        size = HEADER.size
        if len(self.received) >= size:
            size += HEADER.unpack_from(self.received)[0]
        if len(self.received) < size <= LONGEST_ANSWER:
            return None
        answer = _decode(self.received[HEADER.size :])
        if len(self.received) != size or answer is None or answer.pop("number", None) != self.number:
            self.alive = False
            return {"error": "wrote to the file descriptor that its worker answers through (the worker is replaced)"}
        self.alive = not answer.pop("retire", False)
        return answer

    def kill(self) -> None:
        self.pipe.close()
        for end in (os.killpg, os.kill):  # the group first, with all processes the function started
            with contextlib.suppress(ProcessLookupError, PermissionError):
                end(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)

    def _ending(self) -> str:
        status = wait(self.pid)
        if status is None:
            return "closed the pipe it answers through"
        code = os.waitstatus_to_exitcode(status)
        return f"exit code {code}" if code >= 0 else f"signal {signal_name(-code)}"


def _work(pipe: socket.socket, functions: list[Function], memory: int, parent: int) -> None:
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _bind_to(parent)
    _limit(memory)
    while (request := receive(pipe)) is not None:
        answer = _call(functions[request["function"]], json.loads(request["arguments"]))
        with contextlib.suppress(OSError, ValueError, AttributeError):  # the function may have closed them
            sys.stdout.flush()
            sys.stderr.flush()
        send(pipe, {**answer, "number": request["number"]})


def _call(function: Function, arguments: dict[str, Any]) -> dict[str, Any]:
    try:
        outcome = checked(function(**arguments))
    except MemoryError:
        return {"value": None, "error": "ran out of the memory it may use", "retire": True}
    except BaseException as error:  # SystemExit and KeyboardInterrupt of a reward fail its sample, nothing else
        return {"value": None, "error": describe(error)}
    return {"value": outcome.value, "error": outcome.error}


def _bind_to(parent: int) -> None:
    """Ends this process with the supervisor, even if that is killed."""
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
        ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def _limit(memory: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform != "linux":
        return
    with open("/proc/self/statm") as statm:
        inherited = int(statm.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = inherited + memory if hard == resource.RLIM_INFINITY else min(hard, inherited + memory)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")  # if the machine runs out of memory, this process goes, not the trainer


def _decode(data: bytes) -> dict[str, Any] | None:
    """Returns an answer, or None for anything that `_call` never returns."""
    try:
        answer = json.loads(data)
        value, error = answer["value"], answer["error"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    is_value = isinstance(value, float) and math.isfinite(value) and error is None
    return answer if is_value or (value is None and isinstance(error, str)) else None


def wait(pid: int) -> int | None:
    """Returns the exit status of a child, or None if it has not ended within `GRACE` seconds."""
    deadline = time.monotonic() + GRACE
    while time.monotonic() < deadline:
        reaped, status = os.waitpid(pid, os.WNOHANG)
        if reaped:
            return status
        time.sleep(0.005)
    return None


def random_number() -> int:
    return int.from_bytes(os.urandom(8), "big")


def fork() -> int:
    with warnings.catch_warnings():
        # Python 3.12 warns about threads of the parent; the module docstring says why this fork is safe.
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            return os.fork()
        except OSError as error:
            raise TrimtabError(f"cannot start a process for user functions: {error.strerror}") from None


def never_return(body: Callable[[], None]) -> None:
    """Runs `body` in a forked child and always exits without the parent's exit handlers."""
    try:
        body()
    except BaseException:
        os._exit(1)
    os._exit(0)


def send(pipe: socket.socket, message: Any) -> None:
    data = json.dumps(message).encode()
    pipe.sendall(HEADER.pack(len(data)) + data)


def receive(pipe: socket.socket) -> Any:
    """Returns the next message, or None if the other end is closed."""
    header = _receive_exactly(pipe, HEADER.size)
    if header is None:
        return None
    data = _receive_exactly(pipe, HEADER.unpack(header)[0])
    return None if data is None else json.loads(data)


def _receive_exactly(pipe: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        chunk = pipe.recv(min(size - len(data), 1 << 20))
        if not chunk:
            return None
        data += chunk
    return bytes(data)
