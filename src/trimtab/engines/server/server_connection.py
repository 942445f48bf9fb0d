"""Client of one inference server: health, served model, weight version."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from trimtab.engines.server.http_client import Connection, RequestRejected, ServerUnavailable
from trimtab.engines.server.server_protocol import CompletionRequest, CompletionResult, Model, ServerProtocol
from trimtab.errors import TrimtabError

# Seconds for answers to health and weight queries and to aborts: a busy server answers late, one that hangs never.
CONTROL_TIMEOUT = 30.0
# Seconds between two checks of a server that does not answer: the first, doubled up to the maximum.
INITIAL_BACKOFF, MAX_BACKOFF = 0.25, 5.0
# Seconds between two messages about a wait.
NOTIFY_INTERVAL = 5.0
# Failed checks after which a server counts as lost; four seconds in all, so that short failures do not count.
MAX_FAILED_CHECKS = 5
# How often in a row a server is given weights that it then does not report as its own.
MAX_WEIGHT_UPLOADS = 5
# Status of a completion request to a server whose model process is dying. For a control route: the command failed.
INTERNAL_SERVER_ERROR = 500


class WrongWeights(ServerUnavailable):
    """The server does not hold the expected weights; the request was not sent."""


class ServerConnection:
    """The client of one server. `model` and `label` (of the weights) must not change after the first check."""

    def __init__(self, url: str, protocol: ServerProtocol, timeout: float, vocabulary: int) -> None:
        self.url = url
        self.protocol = protocol
        self.lost_at: float | None = None  # on the monotonic clock
        self.model: Model | None = None
        self.label: str | None = None
        self._timeout = timeout
        self._check_lock = threading.Lock()
        self._checks = 0
        self._failed_uploads = 0  # consecutive uploads after which the server did not report the uploaded weights
        self._vocabulary = vocabulary
        self._probe_lock = threading.Lock()
        self._processed = False

    @property
    def alive(self) -> bool:
        """Whether the server does not count as lost."""
        return self.lost_at is None

    def connect(self) -> Connection:
        return Connection(self.url, self._timeout)

    def request(self, connection: Connection, request: CompletionRequest) -> CompletionResult:
        """Returns one response over a connection of `connect`.

        A connection ends in one server process, so the label of the weights is read whenever it was opened again: a
        server that was restarted in between would answer with the weights it started from.
        """
        assert self.model is not None
        if not connection.is_open:
            try:
                label = self.protocol.label(connection)
            except ServerUnavailable as error:
                raise WrongWeights(str(error)) from error
            if label != self.label:
                connection.close()
                raise WrongWeights(f"{self.url} was restarted: its weights are {label!r}, not {self.label!r}")
            self._failed_uploads = 0
        try:
            if request.sampling.temperature not in (0.0, 1.0):
                self._check_processed(connection, request.ids, self.model)
            return self.protocol.request(connection, request, self.model)
        except RequestRejected as error:
            if error.status == INTERNAL_SERVER_ERROR:
                raise ServerUnavailable(str(error)) from error
            raise

    def _check_processed(self, connection: Connection, ids: list[int], model: Model) -> None:
        """Checks, once after each health check, that log-probs are those of the distribution that is sampled.

        Raises:
            TrimtabError: they are not.
        """
        with self._probe_lock:
            self._processed = self._processed or self.protocol.processed(connection, ids, model, self._vocabulary)
        if not self._processed:
            raise TrimtabError(
                f"{self.url} returns log-probs from before the temperature: start vLLM with --logprobs-mode "
                "processed_logprobs, SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB"
            )

    def abort(self) -> None:
        """Aborts all requests of the server; a server that does not answer counts as aborted."""
        connection = Connection(self.url, CONTROL_TIMEOUT)
        try:
            self.protocol.abort(connection)
        except ServerUnavailable:
            return
        finally:
            connection.close()

    def check_and_update(self, weights: Path | None) -> None:
        """Checks health and model, and loads `weights` where the server reports others.

        Raises:
            ServerUnavailable: the server does not answer now.
            TrimtabError: it serves another model, does not load the weights, or never reports them as its own.
        """
        connection = Connection(self.url, CONTROL_TIMEOUT)
        try:
            connection.get("/health")
            model, label = self.protocol.model(connection), self.protocol.label(connection)
        finally:
            connection.close()
        if self.model is not None and model != self.model:
            raise TrimtabError(
                f"{self.url} came back with {model.name!r} (context {model.context}), it served {self.model.name!r} "
                f"(context {self.model.context}): start it as it was"
            )
        if self.label is not None and label != self.label and weights is not None:
            self._failed_uploads += 1
            if self._failed_uploads > MAX_WEIGHT_UPLOADS:
                raise TrimtabError(
                    f"{self.url} was given the weights {self.label!r} {MAX_WEIGHT_UPLOADS} times and still says that "
                    f"it holds {label!r}: name every server by a URL of its own, without a balancer in front"
                )
            self.load(weights, self.label)
        elif weights is None:
            self.label = label
        self.model, self.lost_at, self._processed = model, None, False
        self._checks += 1

    def load(self, weights: Path, label: str) -> None:
        """Loads the weights in a folder into the server. Raises `ServerUnavailable` if it fails meanwhile."""
        self.label = label
        connection = self.connect()
        try:
            self.protocol.load(connection, weights, label)
        except ServerUnavailable:
            self._mark_lost()
            raise
        finally:
            connection.close()

    def wait_until_healthy(
        self, weights: Path | None, pause: Callable[[float], bool], on_lost: Callable[[ServerUnavailable], None]
    ) -> bool:
        """Checks the server repeatedly until it works; returns False if the call ends first.

        One thread checks while others wait for its result. `pause` waits for a number of seconds and returns whether
        the call has ended. `on_lost` is called for every failed check once the server counts as lost.
        """
        before = self._checks
        with self._check_lock:
            failed_checks, backoff = 0, INITIAL_BACKOFF
            while not pause(0.0):
                if self._checks != before:
                    return True
                try:
                    self.check_and_update(weights)
                    return True
                except ServerUnavailable as error:
                    failed_checks += 1
                    if failed_checks >= MAX_FAILED_CHECKS:
                        self._mark_lost()
                        on_lost(error)
                pause(backoff)
                backoff = min(2 * backoff, MAX_BACKOFF)
            return False

    def _mark_lost(self) -> None:
        self.lost_at = time.monotonic() if self.lost_at is None else self.lost_at


class RateLimitedNotifier:
    """Calls `notify` at most every `NOTIFY_INTERVAL` seconds. Any thread may use it."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        self._notify = notify
        self._next = 0.0
        self._lock = threading.Lock()

    def notify(self, line: str) -> None:
        with self._lock:
            if time.monotonic() < self._next:
                return
            self._next = time.monotonic() + NOTIFY_INTERVAL
        self._notify(line)


def wait_for_servers(
    servers: list[ServerConnection],
    weights: Path | None,
    patience: float,
    notify: Callable[[str], None],
    *,
    everyone: bool,
) -> None:
    """Waits until one server works, or all of them with `everyone`; `notify` gets a line every few seconds.

    Raises:
        TrimtabError: they do not within `patience` seconds.
    """
    deadline, backoff, notifier = time.monotonic() + patience, INITIAL_BACKOFF, RateLimitedNotifier(notify)
    while True:
        unavailable: list[ServerUnavailable] = []
        for server in servers:
            try:
                server.check_and_update(weights)
            except ServerUnavailable as error:
                unavailable.append(error)
        if not unavailable or (not everyone and len(unavailable) < len(servers)):
            return
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TrimtabError(
                f"{len(unavailable)} of {len(servers)} inference servers did not answer within {patience:g} s "
                f"({unavailable[0]}): start them, or raise engine.server.reconnect_timeout (docs/servers.md)"
            )
        count = f"{len(unavailable)} of {len(servers)}"
        notifier.notify(f"waiting up to {remaining:.0f} s for {count} inference servers ({unavailable[0]})")
        time.sleep(min(backoff, remaining))
        backoff = min(2 * backoff, MAX_BACKOFF)
