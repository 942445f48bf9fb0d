"""The requests of one generate call, sent to inference servers: queues, retry and failover."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from trimtab.errors import EngineDeadError, TrimtabError
from trimtab.trainer.config.rollout_sections import ServerConfig
from trimtab.trainer.engines.server.http_client import Connection, ServerUnavailable, WrongAnswer
from trimtab.trainer.engines.server.inference_server import INITIAL_BACKOFF, MAX_BACKOFF, InferenceServer, rate_limited
from trimtab.trainer.engines.server.server_protocol import CompletionRequest, CompletionResult
from trimtab.types import AbortSignal

Result = TypeVar("Result")

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
    with exactly one worker, or done: none is lost and none is answered twice, whatever happens to a server.
    """

    def __init__(
        self,
        servers: Sequence[InferenceServer],
        weights: Path | None,
        settings: ServerConfig,
        notify: Callable[[str], None],
    ) -> None:
        self.decoded_tokens = self.prefilled_tokens = 0
        self.aborted = False  # whether the abort signal was set; then no further request is sent
        self._servers, self._weights, self._settings = servers, weights, settings
        self._notify = rate_limited(notify)
        self._responses = 0
        self._queues = [deque[_Queued]() for _ in servers]
        self._answered_by: dict[int, int] = {}  # response -> server of its last turn
        self._idle = [0] * len(servers)  # workers that wait for a request
        self._recoveries: dict[InferenceServer, asyncio.Task[None]] = {}  # of servers that failed a request
        self._added = asyncio.Event()  # set, then replaced, whenever a request is added

    async def run(self, responses: Sequence[Coroutine[Any, Any, Result]], abort: AbortSignal | None) -> list[Result]:
        """Runs the coroutines of all responses to their end; returns their results. They call `ask` for each request.

        After `abort`, requests that were sent are answered with the tokens sampled so far, other requests with None.
        Raises `EngineDeadError` if all servers were lost and none came back.
        """
        self._responses = len(responses)
        workers = min(self._settings.concurrency, -(-len(responses) // len(self._servers)))  # of each server
        try:
            async with asyncio.TaskGroup() as group:
                helpers = [group.create_task(self._watch(abort))]
                for index in range(len(self._servers)):
                    helpers += [group.create_task(self._work(index)) for _ in range(workers)]
                results = await asyncio.gather(*[group.create_task(response) for response in responses])
                for helper in helpers:
                    helper.cancel()
                return results
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors.exceptions[0].__cause__

    async def ask(self, response: int, request: CompletionRequest) -> CompletionResult | None:
        """Returns the result of the next request of a response; None if the call is aborted before it is answered."""
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
                await self._wait_until_healthy(server, connection)
            while True:
                queued = await self._take(index, connection)
                try:
                    result = await server.request(connection, queued.request)
                    if result.finish == "abort" and not self.aborted:
                        raise ServerUnavailable(f"{server.url} aborted a response that was not to be aborted")
                except ServerUnavailable as error:
                    self._requeue(queued, self._queues[index], error)
                    await self._wait_until_healthy(server, connection)
                else:
                    self.prefilled_tokens += len(queued.request.ids)
                    self.decoded_tokens += len(result.ids)
                    self._answered_by[queued.response] = index
                    queued.result.set_result(result)

    async def _take(self, index: int, connection: Connection) -> _Queued:
        """Waits for a request and returns it: from server `index`'s queue, or from one whose workers are all busy."""
        server, own = self._servers[index], self._queues[index]
        while True:
            while server in self._recoveries:
                await self._wait_until_healthy(server, connection)
            if own:
                return own.popleft()
            if others := [queue for i, queue in enumerate(self._queues) if len(queue) > self._ready_workers(i)]:
                return max(others, key=len).pop()
            self._idle[index] += 1
            await self._added.wait()
            self._idle[index] -= 1

    def _ready_workers(self, index: int) -> int:
        return 0 if self._servers[index] in self._recoveries else self._idle[index]

    def _wake_workers(self) -> None:
        self._added.set()
        self._added = asyncio.Event()

    def _requeue(self, queued: _Queued, queue: deque[_Queued], reason: ServerUnavailable) -> None:
        """Puts an unanswered request back to the front of its server's queue, where other servers may take it."""
        queued.failures += 1
        if isinstance(reason, WrongAnswer):
            self._notify(f"{reason}; the request is sent again")
        if self.aborted:
            queued.result.set_result(None)
        elif queued.failures == MAX_ATTEMPTS:
            raise TrimtabError(
                f"a response was asked for {MAX_ATTEMPTS} times without a usable answer; {reason}; {reason.advice}"
            ) from reason
        else:
            queue.appendleft(queued)
            self._wake_workers()

    async def _wait_until_healthy(self, server: InferenceServer, connection: Connection) -> None:
        """Waits for the task that checks the server, which all its workers share."""
        if server not in self._recoveries:
            self._recoveries[server] = asyncio.create_task(self._recover(server))
        await self._recoveries[server]
        connection.stream = None  # the server may have restarted: the next request checks its weights

    async def _recover(self, server: InferenceServer) -> None:
        """Checks the server repeatedly until it works."""
        failures, backoff = 0, INITIAL_BACKOFF
        while True:
            try:
                await server.check_and_update(self._weights)
                del self._recoveries[server]
                return
            except ServerUnavailable as error:
                failures += 1
                if failures >= MAX_FAILED_CHECKS:
                    server.mark_lost()
                    self._check_reconnect_timeout(error)
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, MAX_BACKOFF)

    def _check_reconnect_timeout(self, error: ServerUnavailable) -> None:
        """Raises `EngineDeadError` if all servers have been lost for `engine.server.reconnect_timeout` seconds."""
        since = [server.lost_at for server in self._servers if server.lost_at is not None]
        if len(since) == len(self._servers):
            if time.monotonic() - max(since) > self._settings.reconnect_timeout:
                raise EngineDeadError(f"no inference server is left: {error}")
            waiting = f"waiting {self._settings.reconnect_timeout:g} s for one to come back"
            self._notify(f"no inference server is left ({error}); {waiting}")
