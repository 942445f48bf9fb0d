"""HTTP connections to inference servers: JSON in, JSON out, errors classified."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Coroutine, Mapping
from functools import cache
from typing import Any, TypeVar

import httpx2
from anyio.from_thread import start_blocking_portal

from trimtab.errors import TrimtabError

Result = TypeVar("Result")

# Status codes of temporary failures: too many requests, a gateway without its server, a server that starts or stops.
TRANSIENT = frozenset((408, 425, 429, 502, 503, 504))
# Seconds after which a machine that does not answer counts as unreachable.
CONNECT_TIMEOUT = 4.0
# Seconds without data before the kernel's first probe, seconds between probes, and number of probes: a machine that has
# crashed is noticed in a minute, rather than when the request times out.
KEEPALIVE = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))
EXCERPT_LENGTH = 300


class ServerUnavailable(Exception):
    """The server did not answer or reported a temporary failure; a retry later or on another server may succeed."""


class RequestRejected(TrimtabError):
    """The server refuses the request; a retry would fail again."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Connection:
    """A client of the base URL `url` with one TCP connection at a time; `timeout` is in seconds and covers one call.

    A TCP connection ends in one server process. `stream` stands for the connection of the last answer (None before the
    first and after an error): as long as it is the same object, the same process has answered.
    """

    def __init__(self, url: str, timeout: float) -> None:
        self.url = url
        self.stream: object | None = None
        self._timeout = timeout
        # The environment is not trusted: it may name a proxy, which would answer in the server's place.
        self._client = httpx2.AsyncClient(
            transport=open_transport(),
            base_url=url,
            headers={"Accept-Encoding": "identity"},
            timeout=httpx2.Timeout(None, connect=CONNECT_TIMEOUT),
            trust_env=False,
        )

    async def call(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Returns the answer to a POST of `body`, or to a GET without one; {} if it is empty or plain text."""
        url, self.stream = f"{self.url}{path}", None
        try:
            async with asyncio.timeout(self._timeout):
                response = await self._client.request("GET" if body is None else "POST", path, json=body)
        except TimeoutError as error:
            raise ServerUnavailable(f"{url}: no answer within {self._timeout:g} s") from error
        except httpx2.RequestError as error:
            cause = _first_cause(error)
            raise ServerUnavailable(f"{url}: {type(cause).__name__}: {cause}") from error
        if response.status_code >= 300:
            message = f"{url} answered {response.status_code}: {_message(response)}"
            if response.status_code in TRANSIENT:
                raise ServerUnavailable(message)
            raise RequestRejected(message, response.status_code)
        try:
            content = response.json() if response.content[:1] == b"{" else {}
        except ValueError as error:
            raise ServerUnavailable(f"{url}: not a JSON object: {response.text[:EXCERPT_LENGTH]!r}") from error
        self.stream = response.extensions.get("network_stream")
        return content

    async def aclose(self) -> None:
        await self._client.aclose()


def open_transport() -> httpx2.AsyncBaseTransport:
    """Returns a transport with one connection, which stays open between calls."""
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    options += [
        (socket.IPPROTO_TCP, getattr(socket, name), value) for name, value in KEEPALIVE if hasattr(socket, name)
    ]
    limits = httpx2.Limits(max_connections=1, keepalive_expiry=None)
    return httpx2.AsyncHTTPTransport(verify=_ssl_context(), trust_env=False, limits=limits, socket_options=options)


def run(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Runs a coroutine on an event loop in a thread of its own, because the caller's thread may run a loop already.

    An exception in the caller's thread, such as Ctrl-C, cancels the coroutine.
    """
    with start_blocking_portal() as portal:
        return portal.call(lambda: coroutine)


def check_url(url: str) -> str:
    """Returns `url` without a trailing slash.

    Raises:
        TrimtabError: it is not `http(s)://host[:port]`.
    """
    try:
        parts = httpx2.URL(url)
    except httpx2.InvalidURL:
        valid = False
    else:
        valid = parts.scheme in ("http", "https") and parts.host and parts.port != 0
        valid = valid and parts.path == "/" and not parts.query and not parts.fragment
    if not valid:
        raise TrimtabError(f"{url!r} is not the base URL of a server: write it like http://127.0.0.1:8000")
    return url.rstrip("/")


@cache
def _ssl_context() -> ssl.SSLContext:
    return ssl.create_default_context()  # takes tens of milliseconds, so it is shared


def _first_cause(error: BaseException) -> BaseException:
    """Returns the error of the operating system, which names the reason, where there is one."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return error


def _message(response: httpx2.Response) -> str:
    """Returns the error message in a response, JSON or text, as one line."""
    try:
        content: Any = response.json()
    except ValueError:
        content = response.text
    for key in ("error", "detail", "message"):
        if isinstance(content, dict) and key in content:
            content = content[key]
    return " ".join(str(content).split())[:EXCERPT_LENGTH]
