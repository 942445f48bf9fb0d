"""Client of one inference server: health, served model, weight version."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from trimtab.engines.server.http_client import Connection, RequestRejected, ServerUnavailable
from trimtab.engines.server.server_protocol import Answer, CompletionRequest, Model, Wire
from trimtab.errors import TrimtabError

# Seconds an answer about itself may take: a server full of work answers late, one that hangs never.
CONTROL_TIMEOUT = 30.0
# Seconds between two looks at a server that does not answer: the first, doubled up to the longest.
FIRST_WAIT, LONGEST_WAIT = 0.25, 5.0
# Seconds after which a wait that lasts is told again.
AGAIN = 5.0
# Looks before a server counts as lost: what passes in these four seconds was a hiccup.
LOOKS = 5
# How often in a row a server is given weights that it then does not answer with.
MAX_WEIGHT_UPLOADS = 5
# How a server whose model process is dying answers a request. To a command it means that the command failed.
INTERNAL = 500


class WrongWeights(ServerUnavailable):
    """The server was found lost before the request was sent."""


class Server:
    """`model` and `label` are what it must serve; both are learned when it is met for the first time."""

    def __init__(self, url: str, wire: Wire, timeout: float, vocabulary: int) -> None:
        self.url = url
        self.wire = wire
        self.lost_at: float | None = None  # on the monotonic clock
        self.model: Model | None = None
        self.label: str | None = None
        self._timeout = timeout
        self._looking = threading.Lock()
        self._meetings = 0
        self._in_vain = 0  # meetings in a row that gave it weights it did not answer with
        self._vocabulary = vocabulary
        self._asking = threading.Lock()
        self._processed = False

    @property
    def alive(self) -> bool:
        """Not known to be lost."""
        return self.lost_at is None

    def connect(self) -> Connection:
        return Connection(self.url, self._timeout)

    def ask(self, connection: Connection, ask: CompletionRequest) -> Answer:
        """One response over a connection of `connect`.

        A connection ends in one process. So the weights are asked for whenever it was opened anew: a server that was
        restarted in between answers, and with the weights it started from.
        """
        assert self.model is not None
        if not connection.is_open:
            try:
                found = self.wire.label(connection)
            except ServerUnavailable as error:
                raise WrongWeights(str(error)) from error
            if found != self.label:
                connection.close()
                raise WrongWeights(f"{self.url} was restarted: its weights are {found!r}, not {self.label!r}")
            self._in_vain = 0
        try:
            if ask.sampling.temperature not in (0.0, 1.0):
                self._check_processed(connection, ask.ids, self.model)
            return self.wire.ask(connection, ask, self.model)
        except RequestRejected as error:
            if error.status == INTERNAL:
                raise ServerUnavailable(str(error)) from error
            raise

    def _check_processed(self, connection: Connection, ids: list[int], model: Model) -> None:
        """Once per start of the server, where it makes a difference."""
        with self._asking:
            self._processed = self._processed or self.wire.processed(connection, ids, model, self._vocabulary)
        if not self._processed:
            raise TrimtabError(
                f"{self.url} returns log-probs from before the temperature: start vLLM with --logprobs-mode "
                "processed_logprobs, SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB"
            )

    def abort(self) -> None:
        """End what it is working on; a server that does not answer has ended it."""
        connection = Connection(self.url, CONTROL_TIMEOUT)
        try:
            self.wire.abort(connection)
        except ServerUnavailable:
            return
        finally:
            connection.close()

    def meet(self, weights: Path | None) -> None:
        """Make sure that it works, with the right model and the weights it was given last.

        Raises:
            ServerUnavailable: it does not, for now.
            TrimtabError: it serves another model, or does not take the weights, or never answers with them.
        """
        connection = Connection(self.url, CONTROL_TIMEOUT)
        try:
            connection.get("/health")
            model, label = self.wire.model(connection), self.wire.label(connection)
        finally:
            connection.close()
        if self.model is not None and model != self.model:
            raise TrimtabError(
                f"{self.url} came back with {model.name!r} (context {model.context}), it served {self.model.name!r} "
                f"(context {self.model.context}): start it as it was"
            )
        if self.label is not None and label != self.label and weights is not None:
            self._in_vain += 1
            if self._in_vain > MAX_WEIGHT_UPLOADS:
                raise TrimtabError(
                    f"{self.url} was given the weights {self.label!r} {MAX_WEIGHT_UPLOADS} times and still says that "
                    f"it holds {label!r}: name every server by a URL of its own, without a balancer in front"
                )
            self.load(weights, self.label)
        elif weights is None:
            self.label = label
        self.model, self.lost_at, self._processed = model, None, False
        self._meetings += 1

    def load(self, weights: Path, label: str) -> None:
        """Give it the weights in a folder. `ServerUnavailable` if it dies of them."""
        self.label = label
        connection = self.connect()
        try:
            self.wire.load(connection, weights, label)
        except ServerUnavailable:
            self._lose()
            raise
        finally:
            connection.close()

    def await_return(
        self, weights: Path | None, pause: Callable[[float], bool], lost: Callable[[ServerUnavailable], None]
    ) -> bool:
        """Look after it until it works (True) or `pause` says that no call waits any more (False).

        One thread looks; others that come here wait for what it finds. `lost` is told of every look in vain once the
        server counts as lost.
        """
        before = self._meetings
        with self._looking:
            looks, wait = 0, FIRST_WAIT
            while not pause(0.0):
                if self._meetings != before:
                    return True
                try:
                    self.meet(weights)
                    return True
                except ServerUnavailable as error:
                    looks += 1
                    if looks >= LOOKS:
                        self._lose()
                        lost(error)
                pause(wait)
                wait = min(2 * wait, LONGEST_WAIT)
            return False

    def _lose(self) -> None:
        self.lost_at = time.monotonic() if self.lost_at is None else self.lost_at


class Teller:
    """Says through `notify` what lasts: at once, and again every few seconds. Any thread may call it."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        self._notify = notify
        self._next = 0.0
        self._telling = threading.Lock()

    def tell(self, line: str) -> None:
        with self._telling:
            if time.monotonic() < self._next:
                return
            self._next = time.monotonic() + AGAIN
        self._notify(line)


def await_any(
    servers: list[Server], weights: Path | None, patience: float, notify: Callable[[str], None], *, everyone: bool
) -> None:
    """Wait until one server, or everyone, works; `notify` gets a line for people every few seconds.

    Raises:
        TrimtabError: not within `patience` seconds.
    """
    deadline, wait, teller = time.monotonic() + patience, FIRST_WAIT, Teller(notify)
    while True:
        silent: list[ServerUnavailable] = []
        for server in servers:
            try:
                server.meet(weights)
            except ServerUnavailable as error:
                silent.append(error)
        if not silent or (not everyone and len(silent) < len(servers)):
            return
        left = deadline - time.monotonic()
        if left <= 0:
            raise TrimtabError(
                f"{len(silent)} of {len(servers)} inference servers did not answer within {patience:g} s "
                f"({silent[0]}): start them, or raise engine.server.patience (docs/servers.md)"
            )
        teller.tell(f"waiting up to {left:.0f} s for {len(silent)} of {len(servers)} inference servers ({silent[0]})")
        time.sleep(min(wait, left))
        wait = min(2 * wait, LONGEST_WAIT)
