"""An HTTP/1.1 connection to an inference server: JSON in, JSON out, errors classified.

A connection belongs to one thread; only `cancel` may be called from another. It stays open between calls and is opened
again when it is used after an error.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from trimtab.errors import TrimtabError

# Status codes of temporary failures: too many requests, a gateway without its server, a server that starts or stops.
TRANSIENT = frozenset((408, 425, 429, 502, 503, 504))
# Seconds. A machine that has crashed delays the end of a call by as much.
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
    """A connection to the base URL `url`; `timeout` is in seconds and covers one call."""

    def __init__(self, url: str, timeout: float) -> None:
        self.url = url
        self._timeout = timeout
        self._http: http.client.HTTPConnection | None = None
        self._canceled = False

    @property
    def is_open(self) -> bool:
        """Whether the next call reaches the same server process as the last one."""
        return self._http is not None and self._http.sock is not None

    def get(self, path: str) -> dict[str, Any]:
        return self._call("GET", path, None)

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return self._call("POST", path, {} if body is None else body)

    def cancel(self) -> None:
        """Cancels the connection from another thread: the current and all later calls raise `ServerUnavailable`."""
        self._canceled = True
        connection = self._http
        sock = None if connection is None else connection.sock
        if sock is not None:
            with contextlib.suppress(OSError):  # the connection is closed already
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self._http is not None:
            self._http.close()
            self._http = None

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        headers = {} if data is None else {"Content-Type": "application/json"}
        try:
            connection = self._open()
            connection.request(method, path, body=data, headers=headers)
            response = connection.getresponse()
            content = response.read()
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise ServerUnavailable(f"{self.url}{path}: {type(error).__name__}: {error}") from error
        if response.status >= 300:
            message = f"{self.url}{path} answered {response.status}: {_message(content)}"
            raise (
                ServerUnavailable(message)
                if response.status in TRANSIENT
                else RequestRejected(message, response.status)
            )
        # Some control routes return an empty body or plain text.
        return _decode(content) if content[:1] == b"{" else {}

    def _open(self) -> http.client.HTTPConnection:
        if self._http is None:
            parts = urlsplit(self.url)
            assert parts.hostname is not None
            if parts.scheme == "https":
                context = ssl.create_default_context()
                self._http = http.client.HTTPSConnection(
                    parts.hostname, parts.port, timeout=CONNECT_TIMEOUT, context=context
                )
            else:
                self._http = http.client.HTTPConnection(parts.hostname, parts.port, timeout=CONNECT_TIMEOUT)
        if self._http.sock is None:
            self._http.connect()
            sock: socket.socket = self._http.sock  # pyright: ignore[reportAssignmentType]  # unknown to its stub
            _keep_alive(sock)
            sock.settimeout(self._timeout)
        if self._canceled:  # checked after the socket exists: either `cancel` sees the socket, or this sees the flag
            raise ConnectionAbortedError("canceled")
        return self._http


def check_url(url: str) -> str:
    """Returns `url` without a trailing slash.

    Raises:
        TrimtabError: it is not `http(s)://host[:port]`.
    """
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        valid = False
    else:
        valid = valid and parts.path in ("", "/") and not parts.query and not parts.fragment
    if not valid:
        raise TrimtabError(f"{url!r} is not the base URL of a server: write it like http://127.0.0.1:8000")
    return url.rstrip("/")


def _keep_alive(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE:
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _decode(data: bytes) -> dict[str, Any]:
    try:
        content = json.loads(data)
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise ServerUnavailable(f"the answer is not a JSON object: {data[:EXCERPT_LENGTH]!r}")
    return content


def _message(data: bytes) -> str:
    """Returns the error message in a response body, JSON or text, as one line."""
    try:
        content: Any = json.loads(data)
    except ValueError:
        content = data.decode(errors="replace")
    for key in ("error", "detail", "message"):
        if isinstance(content, dict) and key in content:
            content = content[key]
    return " ".join(str(content).split())[:EXCERPT_LENGTH]
