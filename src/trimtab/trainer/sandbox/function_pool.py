"""Runs reward functions in worker processes with limits of time and memory.

    trainer --(one JSON message per batch)--> supervisor --(one JSON message per call)--> worker

The supervisor is forked once, when the rewards are built: before a model is loaded and before torch has threads. It
runs this file's loop only, so it cannot hang. Workers are forked from it, call the function, and are killed and
replaced when a call outlives its timeout, dies, or runs out of memory.

Why fork and not a fresh interpreter: a function handed over from Python may be a closure, which only fork carries
without pickling. What fork usually costs is avoided: the supervisor has one thread, so a replacement worker is never
forked out of the trainer's threads and locks, and torch, if loaded, is set to one thread (a forked OpenMP pool hangs).
Linux and macOS; the memory bound and the parent-death signal are Linux only.

Each request carries a random number that its answer repeats. A worker that sends anything else is replaced: a function
may write to the file descriptor it answers through, or leave a thread behind that does, and what it wrote must not be
taken for the answer of another call. This guards against accidents: a function runs inside its worker, where it could
read the number.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import selectors
import signal
import socket
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trimtab.trainer.sandbox.function_worker import (
    LONGEST,
    Function,
    Outcome,
    Worker,
    fork,
    never_return,
    random_number,
    receive,
    send,
    wait,
)

MEMORY = 1 << 30  # bytes a worker may allocate beyond what it inherits
SUPERVISOR_TIMEOUT = 30.0  # seconds the supervisor may take in addition to all timeouts


@dataclass(frozen=True)
class Call:
    """A function call: index of the function, JSON keyword arguments, and the seconds it may take."""

    function: int
    arguments: Mapping[str, Any]
    timeout: float


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
        requests = [{**vars(call), "arguments": json.dumps(call.arguments)} for call in calls]
        answers = self._ask(requests) if requests else []
        return [Outcome(answer.get("value"), answer.get("error")) for answer in answers]

    def _ask(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if self._socket is None:
            self._start()
        assert self._socket is not None
        self._socket.settimeout(min(LONGEST, sum(request["timeout"] for request in requests) + SUPERVISOR_TIMEOUT))
        number = random_number()
        answer = None
        try:
            send(self._socket, {"number": number, "requests": requests})
            answer = receive(self._socket)
        except (OSError, ValueError):
            pass  # the supervisor was killed or stopped: every sample gets an error below
        except BaseException:
            self.close()  # an interrupt between request and answer would pair the next batch with these answers
            raise
        if answer is None or answer["number"] != number:
            self.close()
            return [{"error": "was lost: the process that ran it died (a new one is started)"}] * len(requests)
        return answer["answers"]

    def close(self) -> None:
        """End the supervisor and its workers."""
        self._stop()
        self._socket = None

    def _start(self) -> None:
        connection, remote = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = fork()
        if pid == 0:
            connection.close()
            never_return(lambda: _Supervisor(remote, self._functions, self._workers, self._memory).serve())
        remote.close()
        self._socket = connection
        self._stop = weakref.finalize(self, _end, connection, pid, os.getpid())


def _end(connection: socket.socket, pid: int, owner: int) -> None:
    connection.close()
    if os.getpid() != owner:
        return  # a forked copy of the owner must not end its parent's supervisor
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(pid, signal.SIGTERM)
        if wait(pid) is None:
            os.kill(pid, signal.SIGKILL)  # its workers end with it, see `_bind_to`
            os.waitpid(pid, 0)


class _Supervisor:
    """Distributes calls to workers and enforces timeouts. Exits with its workers as soon as the trainer is gone."""

    def __init__(self, trainer: socket.socket, functions: list[Function], count: int, memory: int) -> None:
        self.trainer = trainer
        self.functions = functions
        self.count = count
        self.memory = memory
        self.workers: list[Worker] = []

    def serve(self) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer handles Ctrl-C and then ends this process
        signal.signal(signal.SIGTERM, lambda *_: self._leave())
        gc.freeze()  # collecting inherited objects would copy the trainer's memory page by page
        if torch := sys.modules.get("torch"):
            torch.set_num_threads(1)
        while (batch := receive(self.trainer)) is not None:
            send(self.trainer, {"number": batch["number"], "answers": self._run(batch["requests"])})
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

    def _idle(self) -> Worker | None:
        for worker in [worker for worker in self.workers if worker.position is None]:
            if worker.is_silent():
                return worker
            self._replace(worker)
        if len(self.workers) < self.count:
            self.workers.append(Worker(self.functions, self.memory, [self.trainer, *(w.pipe for w in self.workers)]))
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
            if worker.pipe in ready and (answer := worker.answer()) is not None:
                results.append((worker.position, answer))
            elif time.monotonic() >= worker.deadline:
                results.append((worker.position, {"error": f"took longer than {worker.timeout:g} s"}))
                worker.alive = False
            else:
                continue
            worker.position = None
        for worker in [worker for worker in self.workers if not worker.alive]:
            self._replace(worker)
        return results

    def _replace(self, worker: Worker) -> None:
        """Ends a worker; `_idle` starts another one when a call waits."""
        self.workers.remove(worker)
        worker.kill()

    def _leave(self) -> None:
        for worker in self.workers:
            worker.kill()
        os._exit(0)
