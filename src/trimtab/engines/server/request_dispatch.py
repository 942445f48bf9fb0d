"""The requests of one generate call, sent to inference servers: queues, retry and failover."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trimtab.config import ServerConfig
from trimtab.engines.server.http_client import ServerUnavailable, WrongAnswer
from trimtab.engines.server.server_pool import (
    INITIAL_BACKOFF,
    MAX_BACKOFF,
    InferenceServer,
    WrongWeights,
    rate_limited,
)
from trimtab.engines.server.server_protocol import CompletionRequest, CompletionResult
from trimtab.errors import EngineDeadError, TrimtabError
from trimtab.types import AbortSignal

# Seconds between two checks of the abort signal and of the results of turns.
POLL_INTERVAL = 0.02
# Failed checks after which a server counts as lost; four seconds in all, so that short failures do not count.
MAX_FAILED_CHECKS = 5
# A request that failed this often fails the call: it may itself be what makes the servers fail.
MAX_ATTEMPTS = 8


@dataclass(slots=True)
class QueuedRequest:
    """A request in the queue; `index` is the index of its response in the call."""

    index: int
    request: CompletionRequest
    failures: int = 0


class Responses(Protocol):
    """The responses of a generate call, whose requests are dispatched."""

    @property
    def waiting(self) -> int:
        """The number of responses whose next request depends on the result of a turn."""
        ...

    def answered(self, request: QueuedRequest, result: CompletionResult) -> None:
        """Takes the result of a request."""
        ...

    def joining(self) -> list[QueuedRequest]:
        """Returns the next requests of responses that no longer wait."""
        ...


class RequestDispatch:
    """The requests of one generate call, sent to all servers.

    Each server gets a contiguous part of the requests, so that the samples of a prompt share its prefix cache; a server
    without requests takes from the end of the longest list. The next turn of a response goes to the server that
    sampled the last one, unless that server is busy and another one is not. A request is waiting, with exactly one
    worker, or done at any time: none is lost and none is answered twice, whatever happens to a server.
    """

    def __init__(
        self,
        servers: Sequence[InferenceServer],
        requests: Sequence[QueuedRequest],
        responses: Responses,
        weights: Path | None,
        settings: ServerConfig,
        notify: Callable[[str], None],
    ) -> None:
        self._servers = servers
        self._responses = responses
        self._weights = weights
        self._reconnect_timeout = settings.reconnect_timeout
        self._notify = rate_limited(notify)
        edges = [len(requests) * i // len(servers) for i in range(len(servers) + 1)]
        self._waiting = [deque(requests[edges[i] : edges[i + 1]]) for i in range(len(servers))]
        self._answered_by: dict[int, int] = {}  # index of a response -> server of its last turn
        self._idle = [0] * len(servers)  # workers that wait for a request
        self._in_check = set[InferenceServer]()  # servers that failed a request
        self._added = asyncio.Event()  # of this moment: replaced whenever a request is added
        self._workers = min(settings.concurrency, -(-(len(requests) + responses.waiting) // len(servers)))  # of each
        self._unanswered = len(requests)
        self._aborted = False
        self._ended = asyncio.Event()

    async def run(self, abort: AbortSignal | None) -> None:
        """Sends the requests until all are answered, or those that had been sent when `abort` was set.

        Raises:
            EngineDeadError: all servers were lost and none came back.
            TrimtabError: a server refuses a request; a request was not answered after many attempts.
        """
        self._end(0)
        for server in self._servers:
            server.lock = asyncio.Lock()
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._watch(abort))]
                for index in range(len(self._servers)):
                    tasks += [group.create_task(self._work(index)) for _ in range(self._workers)]
                await self._ended.wait()
                for task in tasks:
                    task.cancel()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors.exceptions[0].__cause__

    async def _watch(self, abort: AbortSignal | None) -> None:
        """Adds the next turns of responses. After the abort signal, sends nothing more and aborts what was sent."""
        while abort is None or not abort.is_set():
            for request in self._responses.joining():
                self._unanswered += 1
                server = self._answered_by.get(request.index, request.index % len(self._servers))
                self._add(request, self._waiting[server])
            self._end(0)
            await asyncio.sleep(POLL_INTERVAL)
        self._aborted = True
        for waiting in self._waiting:
            self._end(len(waiting))
            waiting.clear()
        await asyncio.gather(*(server.abort() for server in self._servers))

    async def _work(self, index: int) -> None:
        """Runs one connection to a server: sends one request after the other."""
        server, waiting = self._servers[index], self._waiting[index]
        async with server.connect() as connection:
            if server.lost_at is not None:
                await self._wait_until_healthy(server)
            while not self._aborted:
                request = await self._take(index)
                try:
                    result = await server.request(connection, request.request)
                    if result.finish == "abort" and not self._aborted:
                        raise ServerUnavailable(f"{server.url} aborted a response that was not to be aborted")
                except ServerUnavailable as error:
                    self._requeue(request, waiting, error)
                    await self._wait_until_healthy(server)
                else:
                    self._answered_by[request.index] = index
                    self._responses.answered(request, result)
                    self._end(1)

    async def _take(self, index: int) -> QueuedRequest:
        """Waits for a request in the list of server `index`, or in another one whose own workers are all busy."""
        server, own = self._servers[index], self._waiting[index]
        while True:
            if server in self._in_check:
                await self._wait_until_healthy(server)
            if own:
                return own.popleft()
            if others := [waiting for i, waiting in enumerate(self._waiting) if len(waiting) > self._ready_workers(i)]:
                return max(others, key=len).pop()
            self._idle[index] += 1
            await self._added.wait()
            self._idle[index] -= 1

    def _ready_workers(self, index: int) -> int:
        return 0 if self._servers[index] in self._in_check else self._idle[index]

    def _add(self, request: QueuedRequest, waiting: deque[QueuedRequest]) -> None:
        waiting.appendleft(request)
        self._added.set()
        self._added = asyncio.Event()

    def _requeue(self, request: QueuedRequest, waiting: deque[QueuedRequest], reason: ServerUnavailable) -> None:
        """Puts an unanswered request back to the front of its server's list, where other servers may take it.

        A request that was not sent has not failed: all connections of a lost server may take it one after the other.
        """
        request.failures += not isinstance(reason, WrongWeights)
        if isinstance(reason, WrongAnswer):
            self._notify(f"{reason}; the request is sent again")
        if self._aborted:
            self._end(1)
        elif request.failures == MAX_ATTEMPTS:
            raise TrimtabError(
                f"a response was asked for {MAX_ATTEMPTS} times without a usable answer; {reason}; raise "
                "engine.server.timeout if responses take longer"
            )
        else:
            self._add(request, waiting)

    def _end(self, requests: int) -> None:
        """Subtracts requests that are answered or will not be."""
        self._unanswered -= requests
        if not self._unanswered and (self._aborted or not self._responses.waiting):
            self._ended.set()

    async def _wait_until_healthy(self, server: InferenceServer) -> None:
        """Checks the server repeatedly until it works. One worker checks while others wait for its result."""
        checks, failures, backoff = server.checks, 0, INITIAL_BACKOFF
        self._in_check.add(server)
        async with server.lock:
            while server.checks == checks:
                try:
                    await server.check_and_update(self._weights)
                except ServerUnavailable as error:
                    failures += 1
                    if failures >= MAX_FAILED_CHECKS:
                        server.mark_lost()
                        self._check_reconnect_timeout(error)
                    await asyncio.sleep(backoff)
                    backoff = min(2 * backoff, MAX_BACKOFF)
        self._in_check.discard(server)

    def _check_reconnect_timeout(self, error: ServerUnavailable) -> None:
        """Raises `EngineDeadError` if all servers have been lost for `engine.server.reconnect_timeout` seconds."""
        since = [server.lost_at for server in self._servers if server.lost_at is not None]
        if len(since) == len(self._servers):
            if time.monotonic() - max(since) > self._reconnect_timeout:
                raise EngineDeadError(f"no inference server is left: {error}")
            waiting = f"waiting {self._reconnect_timeout:g} s for one to come back"
            self._notify(f"no inference server is left ({error}); {waiting}")
