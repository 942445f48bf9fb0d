"""The requests of one generate call, sent to inference servers: queues, retry and failover."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.errors import EngineDeadError, TrimtabError
from trimtab.trainer.config.sections import ServerConfig
from trimtab.trainer.engines.server.http_client import ServerUnavailable, WrongAnswer
from trimtab.trainer.engines.server.server_pool import (
    INITIAL_BACKOFF,
    MAX_BACKOFF,
    InferenceServer,
    WrongWeights,
    rate_limited,
)
from trimtab.trainer.engines.server.server_protocol import CompletionRequest, CompletionResult
from trimtab.types import AbortSignal

# Seconds between two checks of the abort signal.
POLL_INTERVAL = 0.02
# Failed checks after which a server counts as lost; four seconds in all, so that short failures do not count.
MAX_FAILED_CHECKS = 5
# A request that failed this often fails the call: the request itself may make the servers fail.
MAX_ATTEMPTS = 8


@dataclass(slots=True, eq=False)
class _Queued:
    """A request that waits for its result, which is None if the call is aborted first."""

    response: int
    request: CompletionRequest
    result: asyncio.Future[CompletionResult | None]
    failures: int = 0


class RequestDispatch:
    """The requests of one generate call, sent to all servers.

    Each server gets a contiguous part of the responses, so that the samples of a prompt share its prefix cache; a
    server without requests takes them from the end of the longest queue. The next turn of a response goes to the server
    that sampled the previous turn, unless that server is busy and another is not. At any time, a request is in a queue,
    with exactly one worker, or done: none is lost and none is answered twice, whatever happens to a server. `known`
    holds results of a call that failed; they are not requested again.
    """

    def __init__(
        self,
        servers: Sequence[InferenceServer],
        weights: Path | None,
        settings: ServerConfig,
        notify: Callable[[str], None],
        known: Mapping[CompletionRequest, CompletionResult],
    ) -> None:
        self.results: dict[CompletionRequest, CompletionResult] = {}  # includes the `known` results that were used
        self.aborted = False  # whether the abort signal was set; then no further request is sent
        self._known, self._servers, self._weights, self._settings = known, servers, weights, settings
        self._notify = rate_limited(notify)
        self._responses = 0
        self._queues = [deque[_Queued]() for _ in servers]
        self._answered_by: dict[int, int] = {}  # response -> server of its last turn
        self._idle = [0] * len(servers)  # workers that wait for a request
        self._in_check = set[InferenceServer]()  # servers that failed a request
        self._added = asyncio.Event()  # set, then replaced, whenever a request is added

    async def run(self, responses: Sequence[Coroutine[Any, Any, object]], abort: AbortSignal | None) -> None:
        """Runs the coroutines of all responses to their end. They call `ask` for each request.

        After `abort`, requests that were sent are answered with the tokens sampled so far, other requests with None.
        Raises `EngineDeadError` if all servers were lost and none came back.
        """
        self._responses = len(responses)
        for server in self._servers:
            server.lock = asyncio.Lock()
        workers = min(self._settings.concurrency, -(-len(responses) // len(self._servers)))  # of each server
        try:
            async with asyncio.TaskGroup() as group:
                helpers = [group.create_task(self._watch(abort))]
                for index in range(len(self._servers)):
                    helpers += [group.create_task(self._work(index)) for _ in range(workers)]
                await asyncio.gather(*[group.create_task(response) for response in responses])
                for helper in helpers:
                    helper.cancel()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors.exceptions[0].__cause__

    async def ask(self, response: int, request: CompletionRequest) -> CompletionResult | None:
        """Returns the result of the next request of a response; None if the call is aborted before it is answered."""
        if request in self._known:
            self.results[request] = self._known[request]
            return self._known[request]
        if self.aborted:
            return None
        queued = _Queued(response, request, asyncio.get_running_loop().create_future())
        if response in self._answered_by:
            self._queues[self._answered_by[response]].appendleft(queued)
        else:
            self._queues[len(self._servers) * response // self._responses].append(queued)
        self._wake_workers()
        return await queued.result

    async def _watch(self, abort: AbortSignal | None) -> None:
        """Waits for the abort signal; then sends no further request and aborts the requests that were sent."""
        while abort is None or not abort.is_set():
            await asyncio.sleep(POLL_INTERVAL)
        self.aborted = True
        for queue in self._queues:
            while queue:
                queue.popleft().result.set_result(None)
        await asyncio.gather(*(server.abort() for server in self._servers))

    async def _work(self, index: int) -> None:
        """Runs one connection to a server: sends one request after the other."""
        server = self._servers[index]
        async with server.connect() as connection:
            if server.lost_at is not None:
                await self._wait_until_healthy(server)
            while True:
                queued = await self._take(index)
                try:
                    result = await server.request(connection, queued.request)
                    if result.finish == "abort" and not self.aborted:
                        raise ServerUnavailable(f"{server.url} aborted a response that was not to be aborted")
                except ServerUnavailable as error:
                    self._requeue(queued, self._queues[index], error)
                    await self._wait_until_healthy(server)
                else:
                    self.results[queued.request] = result
                    self._answered_by[queued.response] = index
                    queued.result.set_result(result)

    async def _take(self, index: int) -> _Queued:
        """Waits for a request and returns it: from server `index`'s queue, or from one whose workers are all busy."""
        server, own = self._servers[index], self._queues[index]
        while True:
            if server in self._in_check:
                await self._wait_until_healthy(server)
            if own:
                return own.popleft()
            if others := [queue for i, queue in enumerate(self._queues) if len(queue) > self._ready_workers(i)]:
                return max(others, key=len).pop()
            self._idle[index] += 1
            await self._added.wait()
            self._idle[index] -= 1

    def _ready_workers(self, index: int) -> int:
        return 0 if self._servers[index] in self._in_check else self._idle[index]

    def _wake_workers(self) -> None:
        self._added.set()
        self._added = asyncio.Event()

    def _requeue(self, queued: _Queued, queue: deque[_Queued], reason: ServerUnavailable) -> None:
        """Puts an unanswered request back to the front of its server's queue, where other servers may take it.

        `WrongWeights` does not count as a failure, because the request was not sent: all connections may take it.
        """
        queued.failures += not isinstance(reason, WrongWeights)
        if isinstance(reason, WrongAnswer):
            self._notify(f"{reason}; the request is sent again")
        if self.aborted:
            queued.result.set_result(None)
        elif queued.failures == MAX_ATTEMPTS:
            raise TrimtabError(
                f"a response was asked for {MAX_ATTEMPTS} times without a usable answer; {reason}; raise "
                "engine.server.timeout if responses take longer"
            )
        else:
            queue.appendleft(queued)
            self._wake_workers()

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
            if time.monotonic() - max(since) > self._settings.reconnect_timeout:
                raise EngineDeadError(f"no inference server is left: {error}")
            waiting = f"waiting {self._settings.reconnect_timeout:g} s for one to come back"
            self._notify(f"no inference server is left ({error}); {waiting}")
