"""The queue of one generate call: prompts keep to one server's prefix cache and move when a server fails."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trimtab.engines.server.server_protocol import CompletionRequest, CompletionResult
from trimtab.errors import TrimtabError

# A request that failed this often fails the call: it may itself be what makes the servers fail.
MAX_ATTEMPTS = 8


@dataclass(slots=True)
class QueuedRequest:
    """A request in the queue; `index` is the index of its response in the call."""

    index: int
    request: CompletionRequest
    failures: int = 0


class RequestQueue:
    """Assigns the requests of one call to servers. All methods may be called from any thread.

    Each server gets a contiguous part of the requests, so that the samples of a prompt share its prefix cache; a server
    without requests takes from the end of the longest list. A request is waiting, with exactly one worker, or done at
    any time: none is lost and none is answered twice, whatever happens to a server.
    """

    def __init__(self, requests: Sequence[QueuedRequest], servers: int) -> None:
        edges = [len(requests) * i // servers for i in range(servers + 1)]
        self._waiting = [deque(requests[edges[i] : edges[i + 1]]) for i in range(servers)]
        self._running: set[int] = set()
        self._unanswered = len(requests)
        self._changed = threading.Condition()
        self.interrupted = False
        self.results: dict[int, CompletionResult] = {}
        self.error: BaseException | None = None

    @property
    def over(self) -> bool:
        """Whether the call has ended: all requests are done, it was aborted, or it failed."""
        return self.error is not None or not self._unanswered or (self.interrupted and not self._running)

    def take(self, server: int, idle: Callable[[], None]) -> QueuedRequest | None:
        """Returns the next request for this server, or None at the end of the call.

        A worker without a request waits until the end, because requests of a failing server may move to it; `idle` is
        called before it waits.
        """
        with self._changed:
            while not self.over:
                own_list, longest = self._waiting[server], max(self._waiting, key=len)
                if longest:
                    request = own_list.popleft() if own_list else longest.pop()
                    self._running.add(request.index)
                    return request
                idle()
                self._changed.wait()
            return None

    def finish(self, request: QueuedRequest, result: CompletionResult) -> None:
        with self._changed:
            self._running.remove(request.index)
            assert request.index not in self.results
            self.results[request.index] = result
            self._unanswered -= 1
            self._changed.notify_all()

    def requeue(self, request: QueuedRequest, server: int, reason: Exception, *, asked: bool = True) -> None:
        """Puts an unanswered request back to the front of its server's list, where other servers may take it.

        `asked`: whether it was sent. Otherwise the attempt does not count: the connections of a lost server may take
        the request one after the other.
        """
        with self._changed:
            self._running.remove(request.index)
            request.failures += asked
            if not self.interrupted:
                self._waiting[server].appendleft(request)
            if asked and request.failures == MAX_ATTEMPTS and not self.over:
                self.error = TrimtabError(
                    f"a response was asked for {MAX_ATTEMPTS} times without an answer; {reason}; raise "
                    "engine.server.timeout if responses take longer"
                )
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Ends the call with an error; the first error wins."""
        with self._changed:
            self.error = self.error or error
            self._changed.notify_all()

    def interrupt(self) -> None:
        """Starts no more requests; the call ends when those in progress are answered."""
        with self._changed:
            self.interrupted = True
            for waiting in self._waiting:
                waiting.clear()
            self._changed.notify_all()

    def wait(self, seconds: float | None) -> bool:
        """Waits for the end of the call, at most this long; returns whether it has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self.over, seconds)
            return self.over
