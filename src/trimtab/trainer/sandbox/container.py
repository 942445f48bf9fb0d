"""A running bubblewrap container, seen from outside, and the messages that start and end one."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from trimtab.trainer.sandbox.code_result import GRACE, CodeResult, Limits, took_too_long
from trimtab.trainer.sandbox.container_init import BYTES_PER_CHARACTER, HEADER, LENGTH, MAX_REPORT


class Setup(NamedTuple):
    """What every container is started with; the first message."""

    command: Sequence[str]
    seccomp: bytes


class ContainerRequest(NamedTuple):
    """Starts the container of this number, or ends it."""

    number: int
    start: bool


class Started(NamedTuple):
    """A container that is ready, sent with its connection; or why there is none."""

    number: int
    failure: str | None = None


class ContainerError(Exception):
    """A container that did not start, died, or did not answer in time."""

    def __init__(self, message: str, *, timed_out: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out


class Container:
    """Runs code. What comes out of the container is lengths and text, whatever happens inside.

    Args:
        connection: to process 1 of the container.
        end: ends its processes.
    """

    def __init__(self, connection: socket.socket, end: Callable[[], None]) -> None:
        self._connection = connection
        self._end = end

    def alive(self) -> bool:
        """Whether it has not ended; between two runs it sends nothing."""
        poll = select.poll()  # `select.select` takes no number above 1023
        poll.register(self._connection, select.POLLIN)
        return not poll.poll(0)

    def run(self, code: str, limits: Limits) -> CodeResult:
        """Runs the code. The container has ended with it if the result is `lost`.

        Raises `ContainerError` where the container dies, hangs or breaks the protocol.
        """
        deadline = time.monotonic() + limits.timeout + GRACE
        text = code.encode()
        try:
            self._connection.settimeout(limits.timeout + GRACE)
            self._connection.sendall(LENGTH.pack(len(text)) + text)
            timed_out, ended, output_size, error_size = HEADER.unpack(self._receive(HEADER.size, deadline))
            if output_size > limits.max_output * BYTES_PER_CHARACTER or error_size > MAX_REPORT:
                raise ContainerError("the sandbox broke its protocol")
            output = self._receive(output_size, deadline).decode(errors="replace")
            error = self._receive(error_size, deadline).decode(errors="replace")
        except TimeoutError:
            raise ContainerError(took_too_long(limits), timed_out=True) from None
        except OSError:
            raise ContainerError("the process of this sandbox was killed (by hand, or for lack of memory)") from None
        return CodeResult(output, error or None, bool(timed_out), bool(ended))

    def kill(self) -> None:
        """Ends all processes of the container. `run` in another thread then raises."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._end()

    def _receive(self, size: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            self._connection.settimeout(max(1e-3, deadline - time.monotonic()))
            part = self._connection.recv(size - len(data))
            if not part:
                raise ConnectionResetError
            data += part
        return bytes(data)
