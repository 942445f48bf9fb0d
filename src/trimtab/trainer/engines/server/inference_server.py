"""Inference servers driven by one event loop: health, weights, and single requests."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

from trimtab.errors import EngineDeadError, TrimtabError
from trimtab.trainer.engines.server.http_client import Connection, RequestRejected, ServerUnavailable
from trimtab.trainer.engines.server.server_protocol import (
    CompletionRequest,
    CompletionResult,
    Model,
    ServerProtocol,
    check_result,
)

# Seconds for answers to health and weight queries and to aborts: a busy server answers late, a hung server never.
CONTROL_TIMEOUT = 30.0
# Seconds between two checks of a server that does not answer: the first, doubled up to the maximum.
INITIAL_BACKOFF, MAX_BACKOFF = 0.25, 5.0
# Seconds between two messages about a wait.
NOTIFY_INTERVAL = 5.0
# Seconds between two aborts of a server: a request may arrive after an abort.
ABORT_RETRY_INTERVAL = 1.0
# Tokens that are sampled to check whether log-probs are those of the sampled distribution.
PROBE_TOKENS = 8
# Status of completion requests while the model process of a server dies. On a control route: the command failed.
INTERNAL_SERVER_ERROR = 500


class WrongWeights(ServerUnavailable):
    """The server does not hold the expected weights; the request was not sent."""

    advice = "give each server a separate URL, without a balancer in front"


class InferenceServer:
    """The client of one server. After the first check, the server must report `model` and the weights' `label`."""

    def __init__(self, url: str, protocol: ServerProtocol, timeout: float, vocabulary: int) -> None:
        self.url = url
        self.protocol = protocol
        self.lost_at: float | None = None  # on the monotonic clock; None while the server does not count as lost
        self.model: Model | None = None
        self.label: str | None = None
        self._timeout = timeout
        self._vocabulary = vocabulary
        self._processed = False  # whether log-probs were found to be those of the sampled distribution

    def connect(self) -> aclosing[Connection]:
        return aclosing(Connection(self.url, self._timeout))

    async def request(self, connection: Connection, request: CompletionRequest) -> CompletionResult:
        """Returns the result of a request, sent over a connection of `connect`.

        Every new TCP connection first reads the label of the weights, and a result counts only if it came over the same
        TCP connection: a restarted server would answer with the weights that it started from.

        Raises `ServerUnavailable` (`WrongAnswer` if the answer was wrong) if the request may be sent again, and
        `TrimtabError` if the server refuses it.
        """
        try:
            if connection.stream is None and (label := await self.protocol.label(connection)) != self.label:
                connection.stream = None
                raise WrongWeights(f"{self.url} was restarted: its weights are {label!r}, not {self.label!r}")
            checked = connection.stream
            if request.sampling.temperature not in (0.0, 1.0):
                await self._check_processed(connection, request)
            result = await self._sample(connection, request)
        except RequestRejected as error:
            if error.status == INTERNAL_SERVER_ERROR:
                raise ServerUnavailable(str(error)) from error
            raise
        if connection.stream is None or connection.stream is not checked:
            connection.stream = None
            raise ServerUnavailable(f"{self.url} closed a connection after its weights were checked")
        return result

    async def _sample(self, connection: Connection, request: CompletionRequest) -> CompletionResult:
        assert self.model is not None
        result = await self.protocol.request(connection, request, self.model)
        check_result(self.url, result, request, self._vocabulary)
        return result

    async def _check_processed(self, connection: Connection, request: CompletionRequest) -> None:
        """Checks, once after each health check, that log-probs are those of the sampled distribution."""
        if self._processed:
            return
        probe = replace(request, max_tokens=PROBE_TOKENS, sampling=self.protocol.probe, stop_ids=())
        result = await self._sample(connection, probe)
        if result.finish == "abort":
            raise ServerUnavailable(f"{self.url} aborted the check of its log-probs")
        self._processed = self.protocol.is_processed(result.logp, self._vocabulary)
        if not self._processed:
            raise TrimtabError(
                f"{self.url} returns log-probs from before the temperature: start vLLM with --logprobs-mode "
                "processed_logprobs, SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB"
            )

    async def abort(self) -> None:
        """Aborts all requests of the server repeatedly, until the task is canceled."""
        while True:
            try:
                async with aclosing(Connection(self.url, CONTROL_TIMEOUT)) as connection:
                    await self.protocol.abort(connection)
            except ServerUnavailable:
                pass  # counts as aborted
            await asyncio.sleep(ABORT_RETRY_INTERVAL)

    async def check_and_update(self, weights: Path | None) -> None:
        """Checks health and model, and loads `weights` if the server reports other weights.

        Raises `ServerUnavailable` if it does not answer now, and `TrimtabError` if it serves another model or does not
        load the weights.
        """
        async with aclosing(Connection(self.url, CONTROL_TIMEOUT)) as connection:
            await connection.call("/health")
            model, label = await self.protocol.model(connection), await self.protocol.label(connection)
        if self.model is not None and model != self.model:
            raise TrimtabError(
                f"{self.url} came back with {model.name!r} (context {model.context}), it served {self.model.name!r} "
                f"(context {self.model.context}): start it as it was"
            )
        if weights is None:
            self.label = label
        elif self.label is not None and label != self.label:
            await self.load(weights, self.label)
        self.model, self.lost_at, self._processed = model, None, False

    async def load(self, weights: Path, label: str) -> None:
        """Loads the weights in a folder into the server. Raises `ServerUnavailable` if the server fails meanwhile."""
        self.label = label
        try:
            async with self.connect() as connection:
                await self.protocol.load(connection, weights, label)
        except ServerUnavailable:
            self.mark_lost()
            raise

    def mark_lost(self) -> None:
        self.lost_at = time.monotonic() if self.lost_at is None else self.lost_at


def rate_limited(notify: Callable[[str], None]) -> Callable[[str], None]:
    """Returns a function that calls `notify` at most every `NOTIFY_INTERVAL` seconds."""
    last = -math.inf

    def notify_rarely(line: str) -> None:
        nonlocal last
        if time.monotonic() - last >= NOTIFY_INTERVAL:
            last = time.monotonic()
            notify(line)

    return notify_rarely


async def wait_for_servers(
    servers: Sequence[InferenceServer],
    weights: Path | None,
    timeout: float,
    notify: Callable[[str], None],
    *,
    wait_for_all: bool,
) -> None:
    """Waits until one server works, or all if `wait_for_all`; calls `notify` with a line every few seconds."""
    deadline, backoff, notify = time.monotonic() + timeout, INITIAL_BACKOFF, rate_limited(notify)
    while True:
        unavailable = await _gather(server.check_and_update(weights) for server in servers)
        if not unavailable or (not wait_for_all and len(unavailable) < len(servers)):
            return
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TrimtabError(
                f"{len(unavailable)} of {len(servers)} inference servers did not answer within {timeout:g} s "
                f"({unavailable[0]}): start them, or raise engine.server.reconnect_timeout (docs/servers.md)"
            )
        count = f"{len(unavailable)} of {len(servers)}"
        notify(f"waiting up to {remaining:.0f} s for {count} inference servers ({unavailable[0]})")
        await asyncio.sleep(min(backoff, remaining))
        backoff = min(2 * backoff, MAX_BACKOFF)


async def load_weights(servers: Sequence[InferenceServer], folder: Path, label: str) -> None:
    """Loads weights into every server that is alive; the others get them when they are back.

    Raises `EngineDeadError` if no server is left, and `TrimtabError` if one does not load the weights.
    """
    for server in servers:
        server.label = label
    alive = [server for server in servers if server.lost_at is None]
    unavailable = await _gather(server.load(folder, label) for server in alive)
    if len(unavailable) == len(alive):
        reason = unavailable[0] if unavailable else f"{servers[0].url} is lost"
        raise EngineDeadError(f"no inference server is left: {reason}")


async def _gather(calls: Iterable[Awaitable[None]]) -> list[ServerUnavailable]:
    """Runs all calls concurrently to their end; returns temporary failures, and raises the first other error."""
    errors = [error for error in await asyncio.gather(*calls, return_exceptions=True) if error is not None]
    for error in errors:
        if not isinstance(error, ServerUnavailable):
            raise error
    return [error for error in errors if isinstance(error, ServerUnavailable)]
