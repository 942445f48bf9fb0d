"""HTTP connections to inference servers: JSON in, JSON out, errors classified."""

from __future__ import annotations

import asyncio
import os
import reprlib
import socket
import ssl
from collections.abc import Coroutine, Mapping
from functools import cache
from typing import Any, TypeVar

import httpx2
from anyio.from_thread import start_blocking_portal
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import from_json

from trimtab.errors import TrimtabError
from trimtab.trainer.config.consistency import AUTHORIZATION

Result = TypeVar("Result")
AnswerType = TypeVar("AnswerType", bound="Answer")

# Status codes of temporary failures: too many requests, a gateway without its server, a server that starts or stops.
TRANSIENT = frozenset((408, 425, 429, 502, 503, 504))
# Seconds after which a machine that does not answer counts as unreachable.
CONNECT_TIMEOUT = 4.0
# Seconds without data before the kernel's first probe, seconds between probes, and number of probes: a machine that has
# crashed is noticed in a minute, rather than when the request times out.
KEEPALIVE = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))
# Number of characters of a server's text that a message quotes.
EXCERPT_LENGTH = 300


class ServerUnavailable(Exception):
    """The server did not answer or reported a temporary failure; a retry later or on another server may succeed.

    `advice` says what to do if the retries fail, too.
    """

    advice = "raise engine.server.timeout if responses take longer"


class WrongAnswer(ServerUnavailable):
    """The server gave an answer that cannot be right."""

    advice = "check the server's version and options (docs/servers.md), and that its weights are finite"


class RequestRejected(TrimtabError):
    """The server refuses the request; a retry would fail again."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Answer(BaseModel):
    """The part of a JSON answer that is used. Values are not converted between types; other keys are ignored."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class Connection:
    """A client of the base URL `url` with one TCP connection at a time; `timeout` is in seconds and covers one call.

    A TCP connection belongs to one server process. `stream` identifies the TCP connection of the last answer (None
    before the first answer and after an error): while it is the same object, the same process answers.
    """

    def __init__(self, url: str, timeout: float) -> None:
        try:
            base_url = httpx2.URL(url)
        except httpx2.InvalidURL as error:
            raise TrimtabError(f"engine.server.urls: {url!r} is not the base URL of a server: {error}") from error
        self.url = url
        self.stream: object | None = None
        self._timeout = timeout
        # The environment is not trusted: it may name a proxy, which would answer in the server's place.
        self._client = httpx2.AsyncClient(
            transport=open_transport(),
            base_url=base_url,
            headers={"Accept-Encoding": "identity", **authorization()},
            timeout=httpx2.Timeout(None, connect=CONNECT_TIMEOUT),
            trust_env=False,
        )

    async def ask(self, answer: type[AnswerType], path: str, body: Mapping[str, Any] | None = None) -> AnswerType:
        """Returns the answer to `call`, parsed as an instance of the class `answer`.

        Raises `WrongAnswer` if it is not JSON, or a key is missing or has a value of a wrong type or range.
        """
        content = await self.call(path, body)
        try:
            return answer.model_validate_json(content)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            place = ".".join(str(part) for part in first["loc"]) or "body"
            raise WrongAnswer(
                f"{self.url}{path} gave a wrong answer: {place}: {first['msg']}, got {reprlib.repr(first['input'])}"
            ) from error

    async def call(self, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """Returns the answer to a POST of `body`, or to a GET if `body` is None.

        Raises `ServerUnavailable` for a temporary failure, and `RequestRejected` for another error status.
        """
        url, self.stream = f"{self.url}{path}", None
        try:
            async with asyncio.timeout(self._timeout):
                response = await self._client.request("GET" if body is None else "POST", path, json=body)
        except TimeoutError as error:
            raise ServerUnavailable(f"{url}: no answer within {self._timeout:g} s") from error
        except httpx2.RequestError as error:
            cause = _first_cause(error)
            raise ServerUnavailable(f"{url}: {type(cause).__name__}: {excerpt(cause)}") from error
        if response.status_code >= 300:
            message = f"{url} answered {response.status_code}: {_message(response.content)}"
            if response.status_code in TRANSIENT:
                raise ServerUnavailable(message)
            raise RequestRejected(message, response.status_code)
        self.stream = response.extensions.get("network_stream")
        return response.content

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
    """Runs a coroutine on an event loop in a new thread, because the caller's thread may run a loop already.

    An exception in the caller's thread, such as Ctrl-C, cancels the coroutine.
    """
    with start_blocking_portal() as portal:
        return portal.call(lambda: coroutine)


def authorization() -> dict[str, str]:
    """Returns the authorization header of requests; empty if the environment sets none."""
    value = os.environ.get(AUTHORIZATION, "").strip()
    if not value.isascii() or not value.isprintable():
        raise TrimtabError(f"{AUTHORIZATION} has characters that a header cannot have: write it like 'Bearer KEY'")
    return {"Authorization": value} if value else {}


def excerpt(text: object) -> str:
    """Returns the beginning of a server's text as one line."""
    return " ".join(str(text).split())[:EXCERPT_LENGTH]


@cache
def _ssl_context() -> ssl.SSLContext:
    return ssl.create_default_context()  # takes tens of milliseconds, so it is shared


def _first_cause(error: BaseException) -> BaseException:
    """Returns the innermost cause of an error, such as the error of the operating system, which names the reason."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return error


def _message(content: bytes) -> str:
    """Returns the error message in the body of a response, JSON or text, as one line."""
    try:
        message: Any = from_json(content)
    except ValueError:
        message = content.decode(errors="replace")
    for key in ("error", "detail", "message"):
        if isinstance(message, dict) and key in message:
            message = message[key]
    return excerpt(message)
