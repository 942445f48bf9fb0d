"""The queue of one generate call: prompts keep to one server's prefix cache and move when a server fails."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trimtab.engines.server.server_protocol import Answer, CompletionRequest
from trimtab.errors import TrimtabError

# A response that failed this often is not the victim of a bad moment; it may be what brings the servers down.
ATTEMPTS = 8


@dataclass(slots=True)
class Job:
    """One response that is wanted: `index` is its place in the call."""

    index: int
    ask: CompletionRequest
    failures: int = 0


class Batch:
    """Who works on what. All methods may be called from any thread.

    Jobs are dealt in order, so that the samples of a prompt meet one server's prefix cache; who runs out takes from the
    far end of the longest list. A job is at any time waiting, with exactly one worker, or done: whatever happens to a
    server, none is lost and none is answered twice.
    """

    def __init__(self, jobs: Sequence[Job], servers: int) -> None:
        edges = [len(jobs) * i // servers for i in range(servers + 1)]
        self._waiting = [deque(jobs[edges[i] : edges[i + 1]]) for i in range(servers)]
        self._running: set[int] = set()
        self._missing = len(jobs)
        self._changed = threading.Condition()
        self.interrupted = False
        self.answers: dict[int, Answer] = {}
        self.error: BaseException | None = None

    @property
    def over(self) -> bool:
        """Nothing is left to do, or nothing can be done."""
        return self.error is not None or not self._missing or (self.interrupted and not self._running)

    def take(self, server: int, idle: Callable[[], None]) -> Job | None:
        """The next job for this server, or None at the end.

        A worker without a job stays until the end, for a server that fails gives its jobs back; `idle` is called before
        it waits.
        """
        with self._changed:
            while not self.over:
                own, longest = self._waiting[server], max(self._waiting, key=len)
                if longest:
                    job = own.popleft() if own else longest.pop()
                    self._running.add(job.index)
                    return job
                idle()
                self._changed.wait()
            return None

    def finish(self, job: Job, answer: Answer) -> None:
        with self._changed:
            self._running.remove(job.index)
            assert job.index not in self.answers
            self.answers[job.index] = answer
            self._missing -= 1
            self._changed.notify_all()

    def give_back(self, job: Job, server: int, reason: Exception, *, asked: bool = True) -> None:
        """The job was not answered: it goes first in its server's list, where others may take it.

        `asked`: whether the server ever saw it. The idle connections of a lost server, which take it one after the
        other, must not use up its attempts.
        """
        with self._changed:
            self._running.remove(job.index)
            job.failures += asked
            if not self.interrupted:
                self._waiting[server].appendleft(job)
            if asked and job.failures == ATTEMPTS and not self.over:
                self.error = TrimtabError(
                    f"a response was asked for {ATTEMPTS} times without an answer; {reason}; raise "
                    "engine.server.timeout if responses take longer"
                )
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """End the call; the first error is the one that is told."""
        with self._changed:
            self.error = self.error or error
            self._changed.notify_all()

    def interrupt(self) -> None:
        """Let nothing begin any more; the end has come when what runs is answered."""
        with self._changed:
            self.interrupted = True
            for waiting in self._waiting:
                waiting.clear()
            self._changed.notify_all()

    def wait(self, seconds: float | None) -> bool:
        """Until the end, at most so long; whether it is the end."""
        with self._changed:
            self._changed.wait_for(lambda: self.over, seconds)
            return self.over
