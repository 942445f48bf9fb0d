"""Runs reward functions in worker processes with a timeout and a memory limit.

    trainer --(a line of JSON per batch)--> supervisor --(a line of JSON per call)--> worker

The supervisor is forked once, when the rewards are built: before a model is loaded and before torch starts threads. It
runs only the loop in this file, so it cannot hang. It forks the workers, which call the functions. A worker is killed
and replaced if a call exceeds its timeout, ends the process, or runs out of memory.

Why fork instead of a new interpreter: a function given in Python may be a closure, which cannot be pickled. The usual
problems of fork are avoided. The supervisor has one thread, so workers are never forked from a process with threads and
locks. If torch is loaded, it is set to one thread, because a forked OpenMP pool hangs. Works on Linux and macOS; the
memory limit and the parent-death signal are Linux only.

Each request has a random number, which the answer must repeat; a worker that sends anything else is replaced. Otherwise
text that a function, or a thread it left running, writes to the file descriptor of the answers could be read as the
answer to another call. This protects against accidents, not attacks: a function could read the number in its worker.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import math
import multiprocessing.connection
import os
import resource
import secrets
import signal
import socket
import sys
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from trimtab.errors import TrimtabError, error_text
from trimtab.trainer.processes import signal_name
from trimtab.types import MAX_REWARD

MEMORY = 1 << 30  # bytes that a worker may allocate in addition to the memory it inherits
SUPERVISOR_TIMEOUT = 30.0  # seconds that the supervisor may take in addition to all timeouts
LONGEST = 2e6  # seconds of a wait: the operating system counts milliseconds in 32 bits
LONGEST_ANSWER = 1 << 16  # bytes
EXIT_TIMEOUT = 1.0  # seconds in which a process must exit before it is killed
OUT_OF_MEMORY = "ran out of the memory it may use"


class FunctionCall(NamedTuple):
    """A function call."""

    function: int  # index of the function
    arguments: Mapping[str, Any]  # keyword arguments, JSON types
    timeout: float  # seconds


class Outcome(NamedTuple):
    """The result of a call: a finite value, or an error message."""

    value: float | None = None
    error: str | None = None


def check_value(value: Any) -> Outcome:
    """Returns the outcome of a call that returned `value`: the reward, or an error if `value` is not usable as one."""
    if not isinstance(value, Real | np.bool_):
        return Outcome(error=f"returned {type(value).__name__}, not a number")
    number = float(value)
    if not math.isfinite(number):
        return Outcome(error=f"returned {number}, not a finite number")
    return Outcome(number) if abs(number) <= MAX_REWARD else Outcome(error=f"returned {number}, above {MAX_REWARD:g}")


def describe_error(error: BaseException) -> str:
    """Returns the type and the message of an exception in one short line."""
    return f"raised {' '.join(error_text(error).split())[:250]}"


class FunctionPool:
    """Calls `functions` in worker processes, which end at `close()` or when the pool is garbage-collected."""

    def __init__(
        self, functions: Sequence[Callable[..., Any]], *, workers: int | None = None, memory: int = MEMORY
    ) -> None:
        self._functions = list(functions)
        self._workers = workers or min(8, os.cpu_count() or 1)
        self._memory = memory
        self._start()

    def run(self, calls: Sequence[FunctionCall]) -> list[Outcome]:
        """Returns the outcome of every call, in order. An error in a function is returned as its outcome."""
        if not calls:
            return []
        if self._socket is None:
            self._start()
        assert self._socket is not None
        self._socket.settimeout(min(LONGEST, sum(call.timeout for call in calls) + SUPERVISOR_TIMEOUT))
        try:
            send(self._socket, [call._replace(arguments=json.dumps(call.arguments))._asdict() for call in calls])
            outcomes = receive(self._socket)
        except (OSError, ValueError):
            outcomes = None  # the supervisor was killed or stopped
        except BaseException:
            self.close()  # otherwise the next batch would receive the outcomes of this one
            raise
        if outcomes is None:
            self.close()
            return [Outcome(error="was lost: the process that ran it died (a new one is started)")] * len(calls)
        return [Outcome(*outcome) for outcome in outcomes]

    def close(self) -> None:
        """End the supervisor and its workers."""
        self._stop()
        self._socket = None

    def _start(self) -> None:
        connection, remote = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()

        def supervise() -> None:
            connection.close()
            _Supervisor(remote, self._functions, self._workers, self._memory).serve()

        pid = _fork(supervise)
        remote.close()
        self._socket: socket.socket | None = connection
        self._stop = weakref.finalize(self, _end_supervisor, connection, pid, os.getpid())


def _end_supervisor(connection: socket.socket, pid: int, owner: int) -> None:
    connection.close()
    if os.getpid() != owner:
        return  # a forked copy of the owner must not end the supervisor
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(pid, signal.SIGTERM)
        if _wait_for_exit(pid) is None:
            os.kill(pid, signal.SIGKILL)  # the workers end with it, see `_work`
            os.waitpid(pid, 0)


class _Supervisor:
    """Distributes calls to workers and enforces timeouts. Exits with its workers as soon as the trainer exits."""

    def __init__(self, trainer: socket.socket, functions: list[Callable[..., Any]], count: int, memory: int) -> None:
        self.trainer = trainer
        self.functions = functions
        self.count = count
        self.memory = memory
        self.workers: list[_Worker] = []

    def serve(self) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer handles Ctrl-C and ends this process
        signal.signal(signal.SIGTERM, lambda *_: self._exit())
        gc.freeze()  # garbage collection of inherited objects would copy the memory pages of the trainer
        if torch := sys.modules.get("torch"):
            torch.set_num_threads(1)
        while (batch := receive(self.trainer)) is not None:
            send(self.trainer, self._run(batch))
        self._exit()

    def _run(self, batch: list[dict[str, Any]]) -> list[Outcome]:
        waiting = deque(enumerate(batch))
        outcomes: dict[int, Outcome] = {}
        while len(outcomes) < len(batch):
            while waiting and (worker := self._find_idle()):
                worker.begin(*waiting.popleft())
            outcomes |= self._collect_outcomes()
        return [outcomes[position] for position in range(len(batch))]

    def _find_idle(self) -> _Worker | None:
        for worker in [worker for worker in self.workers if worker.position is None]:
            if worker.is_silent():
                return worker
            self._replace(worker)
        if len(self.workers) < self.count:
            self.workers.append(_Worker(self.functions, self.memory, [self.trainer, *(w.pipe for w in self.workers)]))
            return self.workers[-1]
        return None

    def _collect_outcomes(self) -> dict[int, Outcome]:
        """Waits for an answer or a deadline; returns the outcomes by the positions of the calls."""
        busy = {worker.position: worker for worker in self.workers if worker.position is not None}
        timeout = min(LONGEST, max(0.0, min(worker.deadline for worker in busy.values()) - time.monotonic()))
        ready = multiprocessing.connection.wait([self.trainer, *(worker.pipe for worker in busy.values())], timeout)
        if self.trainer in ready:
            self._exit()  # the trainer sends nothing during a batch: a readable pipe means that it exited
        outcomes = {}
        for position, worker in busy.items():
            outcome = worker.answer() if worker.pipe in ready else None
            if outcome is None and time.monotonic() >= worker.deadline:
                outcome, worker.alive = Outcome(error=f"took longer than {worker.timeout:g} s"), False
            if outcome is not None:
                outcomes[position] = outcome
                worker.position = None
            if not worker.alive:
                self._replace(worker)
        return outcomes

    def _replace(self, worker: _Worker) -> None:
        """Ends a worker; `_find_idle` starts a new one if a call waits."""
        self.workers.remove(worker)
        worker.kill()

    def _exit(self) -> None:
        for worker in self.workers:
            worker.kill()
        os._exit(0)


class _Worker:
    """The supervisor's handle of a forked process that answers one call at a time."""

    def __init__(self, functions: list[Callable[..., Any]], memory: int, foreign: list[socket.socket]) -> None:
        self.pipe, remote = socket.socketpair()
        self.position: int | None = None
        self.alive = True
        parent = os.getpid()

        def work() -> None:
            for inherited in (self.pipe, *foreign):
                inherited.close()
            _work(remote, functions, memory, parent)

        self.pid = _fork(work)
        remote.close()

    def is_silent(self) -> bool:
        """Whether the worker is alive and has sent nothing since its last answer."""
        try:
            self.pipe.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def begin(self, position: int, request: dict[str, Any]) -> None:
        self.position, self.timeout = position, request.pop("timeout")
        self.deadline = time.monotonic() + self.timeout
        self.number = secrets.token_hex(8)
        self.received = b""
        self.pipe.settimeout(min(LONGEST, self.timeout))  # a stopped worker does not read
        with contextlib.suppress(OSError):  # the worker died or stopped: `_collect_outcomes` notices that
            send(self.pipe, {"number": self.number, **request})
        self.pipe.setblocking(False)

    def answer(self) -> Outcome | None:
        """Returns the outcome of the call, or None if the answer is still incomplete."""
        try:
            arrived = self.pipe.recv(LONGEST_ANSWER)
        except OSError:
            arrived = b""
        if not arrived:
            self.alive = False
            return Outcome(error=f"ended its process ({self._describe_end()})")
        self.received += arrived
        if not self.received.endswith(b"\n") and len(self.received) <= LONGEST_ANSWER:
            return None
        outcome = _decode_answer(self.received, self.number)
        self.alive = outcome is not None and outcome.error != OUT_OF_MEMORY
        return outcome or Outcome(
            error="wrote to the file descriptor that its worker answers through (the worker is replaced)"
        )

    def kill(self) -> None:
        self.pipe.close()
        for end in (os.killpg, os.kill):  # first the group, which includes processes that the function started
            with contextlib.suppress(ProcessLookupError, PermissionError):
                end(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)

    def _describe_end(self) -> str:
        status = _wait_for_exit(self.pid)
        if status is None:
            return "closed the pipe it answers through"
        code = os.waitstatus_to_exitcode(status)
        return f"exit code {code}" if code >= 0 else f"signal {signal_name(-code)}"


def _decode_answer(data: bytes, number: str) -> Outcome | None:
    """Returns the outcome in the answer to request `number`, or None if `_work` cannot have sent this data."""
    try:
        answer = json.loads(data)
        sent, value, error = answer["number"], answer["value"], answer["error"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    is_value = isinstance(value, float) and math.isfinite(value) and error is None
    is_error = value is None and isinstance(error, str)
    return Outcome(value, error) if sent == number and (is_value or is_error) else None


def _work(pipe: socket.socket, functions: list[Callable[..., Any]], memory: int, parent: int) -> None:
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == "linux":  # the worker ends with the supervisor, even if the supervisor is killed
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
        ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
    _limit_memory(memory)
    while (request := receive(pipe)) is not None:
        outcome = _call_function(functions[request["function"]], json.loads(request["arguments"]))
        with contextlib.suppress(OSError, ValueError, AttributeError):  # the function may have closed the streams
            sys.stdout.flush()
            sys.stderr.flush()
        send(pipe, {"number": request["number"], **outcome._asdict()})


def _limit_memory(memory: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform != "linux":
        return
    with open("/proc/self/statm") as statm:
        inherited = int(statm.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = inherited + memory if hard == resource.RLIM_INFINITY else min(hard, inherited + memory)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")  # if the machine runs out of memory, the kernel kills this process, not the trainer


def _call_function(function: Callable[..., Any], arguments: dict[str, Any]) -> Outcome:
    try:
        return check_value(function(**arguments))
    except MemoryError:
        return Outcome(error=OUT_OF_MEMORY)
    except BaseException as error:  # SystemExit and KeyboardInterrupt in a reward only fail its sample
        return Outcome(error=describe_error(error))


def _wait_for_exit(pid: int) -> int | None:
    """Returns the exit status of a child, or None if it does not exit within `EXIT_TIMEOUT` seconds."""
    deadline = time.monotonic() + EXIT_TIMEOUT
    while time.monotonic() < deadline:
        reaped, status = os.waitpid(pid, os.WNOHANG)
        if reaped:
            return status
        time.sleep(0.005)
    return None


def _fork(body: Callable[[], None]) -> int:
    """Runs `body` in a forked child, which exits without running exit handlers. Returns the pid of the child."""
    with warnings.catch_warnings():
        # Python 3.12 warns if the parent has threads; the module docstring explains why this fork is safe.
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            pid = os.fork()
        except OSError as error:
            raise TrimtabError(f"cannot start a process for user functions: {error.strerror}") from None
    if pid > 0:
        return pid
    try:
        body()
    except BaseException:
        os._exit(1)
    os._exit(0)


def send(pipe: socket.socket, message: Any) -> None:
    pipe.sendall(json.dumps(message).encode() + b"\n")


def receive(pipe: socket.socket) -> Any:
    """Returns the next message, or None if the other end is closed. Messages alternate, so none follows this one."""
    data = bytearray()
    while not data.endswith(b"\n"):
        part = pipe.recv(1 << 20)
        if not part:
            return None
        data += part
    return json.loads(data)
