"""Runs reward functions in worker processes with limits of time and memory.

    trainer --(one JSON message per batch)--> supervisor --(one JSON message per call)--> worker

The supervisor is forked once, when the rewards are built: before a model is loaded and before torch has threads. It
runs this file's loop only, so it cannot hang. Workers are forked from it, call the function, and are killed and
replaced when a call outlives its timeout, dies, or runs out of memory.

Why fork and not a fresh interpreter: a function handed over from Python may be a closure, which only fork carries
without pickling. What fork usually costs is avoided: the supervisor has one thread, so a replacement worker is never
forked out of the trainer's threads and locks, and torch, if loaded, is set to one thread (a forked OpenMP pool hangs).
Linux and macOS; the memory bound and the parent-death signal are Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import math
import os
import resource
import selectors
import signal
import socket
import struct
import sys
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from trimtab.errors import TrimtabError
from trimtab.types import MAX_REWARD

Function = Callable[..., Any]
MEMORY = 1 << 30  # bytes a worker may allocate beyond what it inherits
SUPERVISOR_TIMEOUT = 30.0  # seconds the supervisor may take in addition to all timeouts
LONGEST = 2e6  # seconds: the operating system counts the milliseconds of a wait in 32 bits
HEADER = struct.Struct("!Q")


@dataclass(frozen=True, slots=True)
class Call:
    """A function call: index of the function, JSON keyword arguments, and the seconds it may take."""

    function: int
    arguments: Mapping[str, Any]
    timeout: float


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
    """Returns the type and the first line of an exception, short enough for a log."""
    lines = str(error).strip().splitlines()
    return f"raised {type(error).__name__}{': ' + lines[0][:200] if lines else ''}"


class FunctionPool:
    """Calls `functions` in worker processes, which end with `close()` or garbage collection."""

    def __init__(self, functions: Sequence[Function], *, workers: int | None = None, memory: int = MEMORY) -> None:
        self._functions = list(functions)
        self._workers = workers or min(8, os.cpu_count() or 1)
        self._memory = memory
        self._socket: socket.socket | None = None
        self._stop: Callable[[], Any] = lambda: None
        self._start()

    def run(self, calls: Sequence[Call]) -> list[Outcome]:
        """Returns the outcome of every call, in order. Never raises for what a function does."""
        encoded, outcomes = _encode(calls)
        if not encoded:
            return outcomes
        for request, answer in zip(encoded, self._ask(encoded), strict=True):
            outcomes[request["index"]] = Outcome(answer.get("value"), answer.get("error"))
        return outcomes

    def _ask(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if self._socket is None:
            self._start()
        assert self._socket is not None
        self._socket.settimeout(min(LONGEST, sum(request["timeout"] for request in requests) + SUPERVISOR_TIMEOUT))
        answers = None
        try:
            _send(self._socket, requests)
            answers = _receive(self._socket)
        except OSError:
            pass  # the supervisor was killed or stopped: every sample gets an error below
        except BaseException:
            self.close()  # an interrupt between request and answer would pair the next batch with these answers
            raise
        if answers is None:
            self.close()
            return [{"error": "was lost: the process that runs rewards died (a new one is started)"}] * len(requests)
        return answers

    def close(self) -> None:
        """End the supervisor and its workers."""
        self._stop()
        self._socket = None

    def _start(self) -> None:
        connection, remote = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = _fork()
        if pid == 0:
            connection.close()
            _never_return(lambda: _Supervisor(remote, self._functions, self._workers, self._memory).serve())
        remote.close()
        self._socket = connection
        self._stop = weakref.finalize(self, _end, connection, pid, os.getpid())


def _encode(calls: Sequence[Call]) -> tuple[list[dict[str, Any]], list[Outcome]]:
    """Returns the requests to send, and an outcome for each call (an error where its arguments are not JSON)."""
    requests: list[dict[str, Any]] = []
    outcomes = [Outcome(error="not run")] * len(calls)
    for index, call in enumerate(calls):
        try:
            arguments = json.dumps(call.arguments)
        except (TypeError, ValueError) as error:
            outcomes[index] = Outcome(error=f"cannot be given its arguments, which must be JSON: {error}")
            continue
        requests.append({"index": index, "function": call.function, "arguments": arguments, "timeout": call.timeout})
    return requests, outcomes


def _end(connection: socket.socket, pid: int, owner: int) -> None:
    connection.close()
    if os.getpid() != owner:
        return  # a forked copy of the owner must not end its parent's supervisor
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


class _Supervisor:
    """Distributes calls to workers and enforces timeouts. Exits with its workers as soon as the trainer is gone."""

    def __init__(self, trainer: socket.socket, functions: list[Function], count: int, memory: int) -> None:
        self.trainer = trainer
        self.functions = functions
        self.count = count
        self.memory = memory
        self.workers: list[_Worker] = []

    def serve(self) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer handles Ctrl-C and then ends this process
        signal.signal(signal.SIGTERM, lambda *_: self._leave())
        gc.freeze()  # collecting inherited objects would copy the trainer's memory page by page
        if torch := sys.modules.get("torch"):
            torch.set_num_threads(1)
        while (batch := _receive(self.trainer)) is not None:
            _send(self.trainer, self._run(batch))
        self._leave()

    def _run(self, batch: list[dict[str, Any]]) -> list[dict[str, Any]]:
        waiting = deque(enumerate(batch))
        answers: list[dict[str, Any]] = [{} for _ in batch]
        done = 0
        while done < len(batch):
            while waiting and (worker := self._idle()):
                position, request = waiting.popleft()
                worker.begin(position, request)
            for position, answer in self._finished():
                answers[position] = answer
                done += 1
        return answers

    def _idle(self) -> _Worker | None:
        for worker in self.workers:
            if worker.position is None:
                return worker
        if len(self.workers) < self.count:
            self.workers.append(_Worker(self.functions, self.memory, [self.trainer, *(w.pipe for w in self.workers)]))
            return self.workers[-1]
        return None

    def _finished(self) -> list[tuple[int, dict[str, Any]]]:
        busy = [worker for worker in self.workers if worker.position is not None]
        timeout = min(LONGEST, max(0.0, min(worker.deadline for worker in busy) - time.monotonic()))
        with selectors.DefaultSelector() as selector:
            selector.register(self.trainer, selectors.EVENT_READ)
            for worker in busy:
                selector.register(worker.pipe, selectors.EVENT_READ)
            ready = {key.fileobj for key, _ in selector.select(timeout)}
        if self.trainer in ready:
            self._leave()  # the trainer is silent during a batch: readable means it is gone
        results = []
        for worker in busy:
            if worker.pipe in ready:
                results.append((worker.position, worker.answer()))
            elif time.monotonic() >= worker.deadline:
                results.append((worker.position, {"error": f"took longer than {worker.timeout:g} s"}))
                worker.alive = False
            else:
                continue
            worker.position = None
        for worker in [worker for worker in self.workers if not worker.alive]:
            self.workers.remove(worker)
            worker.kill()
        return results

    def _leave(self) -> None:
        for worker in self.workers:
            worker.kill()
        os._exit(0)


class _Worker:
    """The supervisor's handle of a forked process that answers one call at a time."""

    def __init__(self, functions: list[Function], memory: int, foreign: list[socket.socket]) -> None:
        self.pipe, remote = socket.socketpair()
        self.position: int | None = None
        self.deadline = math.inf
        self.timeout = math.inf
        self.alive = True
        parent = os.getpid()
        self.pid = _fork()
        if self.pid == 0:
            for inherited in [self.pipe, *foreign]:
                inherited.close()
            _never_return(lambda: _work(remote, functions, memory, parent))
        remote.close()

    def begin(self, position: int, request: dict[str, Any]) -> None:
        self.position, self.timeout = position, request["timeout"]
        self.deadline = time.monotonic() + self.timeout
        with contextlib.suppress(OSError):  # it died while idle: seen as the end of its pipe in a moment
            _send(self.pipe, {"function": request["function"], "arguments": request["arguments"]})

    def answer(self) -> dict[str, Any]:
        try:
            answer = _receive(self.pipe)
        except OSError:
            answer = None
        if answer is None:
            self.alive = False
            return {"error": f"ended its process ({self._ending()})"}
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
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            reaped, status = os.waitpid(self.pid, os.WNOHANG)
            if reaped:
                code = os.waitstatus_to_exitcode(status)
                return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
            time.sleep(0.005)
        return "closed the pipe it answers through"


def _work(pipe: socket.socket, functions: list[Function], memory: int, parent: int) -> None:
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _bind_to(parent)
    _limit(memory)
    while (request := _receive(pipe)) is not None:
        answer = _call(functions[request["function"]], json.loads(request["arguments"]))
        with contextlib.suppress(OSError, ValueError, AttributeError):  # the function may have closed them
            sys.stdout.flush()
            sys.stderr.flush()
        _send(pipe, answer)


def _call(function: Function, arguments: dict[str, Any]) -> dict[str, Any]:
    try:
        outcome = checked(function(**arguments))
    except MemoryError:
        return {"error": "ran out of the memory a reward may use", "retire": True}
    except BaseException as error:  # SystemExit and KeyboardInterrupt of a reward fail its sample, nothing else
        return {"error": describe(error)}
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


def _fork() -> int:
    with warnings.catch_warnings():
        # Python 3.12 warns about threads of the parent; the module docstring says why this fork is safe.
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            return os.fork()
        except OSError as error:
            raise TrimtabError(f"cannot start a process for rewards: {error.strerror}") from None


def _never_return(body: Callable[[], None]) -> None:
    """Runs `body` in a forked child and always exits without the parent's exit handlers."""
    try:
        body()
    except BaseException:
        os._exit(1)
    os._exit(0)


def _send(pipe: socket.socket, message: Any) -> None:
    data = json.dumps(message).encode()
    pipe.sendall(HEADER.pack(len(data)) + data)


def _receive(pipe: socket.socket) -> Any:
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
