"""A child process that exchanges messages with this one: start, heartbeats, exit reason, death with its parent.

Messages are pickled: both ends are this program on one machine, joined by a private pair of sockets.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

HEARTBEAT_INTERVAL = 1.0  # seconds between heartbeats, and between checks of the parent
TRANSFER_TIMEOUT = 300  # seconds without progress after which a transfer of a message fails
OUTPUT_TAIL_BYTES = 4096  # bytes at the end of the child's output in which to find its last line
# Set by torchrun and removed from the child's environment: the child is not a rank. torch.distributed started in it (by
# vLLM) would otherwise join the trainer's ranks and wait for their store.
TORCHRUN_VARIABLES = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "ROLE_NAME"}
TORCHRUN_VARIABLES |= {"GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE"}


class Message(NamedTuple):
    """A message, and the open file that was sent with it, if any; the receiver must close the file."""

    content: Any
    descriptor: int | None = None


class Heartbeat(NamedTuple):
    """Sent while the child works. `progress` grows as the work proceeds."""

    progress: int


class WorkerProcess:
    """Runs `python -P -m module` in a new session; the module talks to this process through `Parent`.

    Ctrl-C in the terminal does not reach the child, and the child is not a rank of torchrun. If this process ends, for
    any reason, the child and everything it started end too. Only one thread at a time may send and receive. Another
    thread may call `close` or `kill`; `send` and `receive` then raise.

    module: the `__main__` module of the child, which does not import this process's `__main__`. environment: variables
    to add to this process's environment. show_output: whether the child's output appears on the standard error of this
    process. Otherwise it goes to an unnamed file, whose last line `last_output` returns.
    """

    def __init__(self, module: str, *, environment: Mapping[str, str] | None = None, show_output: bool = False) -> None:
        self.progress = 0
        self._connection, child_end = multiprocessing.Pipe()
        _limit_transfers(self._connection)
        with tempfile.TemporaryFile() as file:
            self._output = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._output)
        output = 2 if show_output else self._output
        own = {k: v for k, v in os.environ.items() if k not in TORCHRUN_VARIABLES and not k.startswith("TORCHELASTIC_")}
        with child_end:
            self.process = subprocess.Popen(
                # -P: a module in the working directory must not shadow an installed one.
                [sys.executable, "-P", "-m", module, str(child_end.fileno()), str(os.getpid())],
                pass_fds=[child_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**own, **(environment or {})},
                start_new_session=True,
            )
        self.kill = weakref.finalize(self, _kill, self._connection, self.process, os.getpid())

    def send(self, content: Any, descriptor: int | None = None) -> None:
        """Sends a message, with a copy of an open file if given. Raises `OSError` if the child does not take it."""
        try:
            _send(self._connection, content, descriptor)
        except BaseException:
            self.kill()  # a partly sent message would be mixed up with the next one
            raise

    def receive(self, timeout: float | None = None) -> Message | None:
        """Returns the next message; None if there was none, or only a heartbeat, within `timeout` seconds.

        Raises `EOFError` or `OSError` if the child has ended, or `close` or `kill` was called.
        """
        if not self._connection.poll(timeout):
            return None
        message = _receive(self._connection)
        if isinstance(message.content, Heartbeat):
            self.progress = message.content.progress
            return None
        return message

    def close(self, timeout: float) -> None:
        """Closes the connection, which makes the child exit; kills it if it still runs after `timeout` seconds."""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired), _as_socket(self._connection) as end:
            end.shutdown(socket.SHUT_WR)
            self.process.wait(timeout)
        self.kill()

    def exit_reason(self, error: Exception | None = None) -> str:
        """Waits for the child to end, after `error` if one was raised. Returns how it ended, as a clause."""
        if isinstance(error, BlockingIOError):
            self.kill()  # it may never end by itself
            return f"moved no byte for {TRANSFER_TIMEOUT} s"
        code = self.process.wait()
        if code == -signal.SIGKILL:
            return "was killed (by hand, or because memory ran out)"
        return f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"

    def last_output(self) -> str:
        """Returns the last line of the child's output, as a clause for messages; empty if there is none."""
        size = os.fstat(self._output).st_size
        tail = os.pread(self._output, OUTPUT_TAIL_BYTES, max(0, size - OUTPUT_TAIL_BYTES)).decode(errors="replace")
        lines = tail.strip().splitlines()
        return f", last saying {lines[-1].strip()[:200]!r}," if lines else ""


class Parent:
    """The child's end of a `WorkerProcess`. The child and everything it started are killed when the parent closes the
    connection or ends for any reason.

    receive: called with every message, in the thread that reads the connection, even while the child works. progress: a
    number to send as a heartbeat, once a second; None while the parent awaits no answer. close: called in that thread
    when the parent is gone, before the child is killed.
    """

    def __init__(
        self,
        receive: Callable[[Message], None],
        *,
        progress: Callable[[], int | None] = lambda: None,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        descriptor, parent = sys.argv[1:]
        os.set_inheritable(int(descriptor), False)  # a process that outlives this one must not keep it open
        self._connection, self._pid = Connection(int(descriptor)), int(parent)
        self._receive, self._progress, self._close = receive, progress, close
        self._sending = threading.Lock()
        threading.Thread(target=self._listen, daemon=True).start()

    def send(self, content: Any, descriptor: int | None = None) -> None:
        with self._sending:
            _send(self._connection, content, descriptor)

    def _listen(self) -> None:
        try:
            due = time.monotonic() + HEARTBEAT_INTERVAL
            # Checks the pid too: a process forked from the parent may hold the connection open after its exit.
            while os.getppid() == self._pid:
                if self._connection.poll(max(0.0, due - time.monotonic())):
                    self._receive(_receive(self._connection))
                if time.monotonic() >= due:
                    self._send_heartbeat()
                    due = time.monotonic() + HEARTBEAT_INTERVAL
        except (EOFError, OSError):
            pass  # the parent closed the connection or exited
        except Exception:
            traceback.print_exc()
        finally:
            try:
                self._close()
                sys.stderr.flush()
            finally:  # whatever they raise
                os.killpg(0, signal.SIGKILL)  # this process leads a process group of everything it started

    def _send_heartbeat(self) -> None:
        progress = self._progress()
        # While a message is being sent no heartbeat is needed, and this thread must not block: it watches the parent.
        if progress is not None and self._sending.acquire(blocking=False):
            try:
                _send(self._connection, Heartbeat(progress))
            finally:
                self._sending.release()


def signal_name(number: int) -> str:
    """Returns a signal's name; for a real-time signal without a name, `SIGRTMIN` plus its distance."""
    names = {int(member): member.name for member in signal.Signals}
    return names.get(number, f"SIGRTMIN{number - signal.SIGRTMIN:+}")


def _send(connection: Connection, content: Any, descriptor: int | None = None) -> None:
    connection.send((content, descriptor is not None))
    if descriptor is not None:
        with _as_socket(connection) as end:
            socket.send_fds(end, [b"\0"], [descriptor])


def _receive(connection: Connection) -> Message:
    content, has_file = connection.recv()
    if not has_file:
        return Message(content)
    with _as_socket(connection) as end:
        _, files, _, _ = socket.recv_fds(end, 1, 1)
    if not files:
        raise EOFError
    os.set_inheritable(files[0], False)
    return Message(content, files[0])


def _as_socket(connection: Connection) -> socket.socket:
    """Returns another handle of the connection, to be closed by the caller."""
    return socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM)


def _limit_transfers(connection: Connection) -> None:
    """Makes the connection raise `BlockingIOError` if a message makes no progress for `TRANSFER_TIMEOUT` seconds."""
    with _as_socket(connection) as end:
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            end.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", TRANSFER_TIMEOUT, 0))


def _kill(connection: Connection, process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked copy of this process must not end its parent's child
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # including processes that it started, which may still run
    # Wakes a thread that waits for a message. The connection is closed with the last reference: its descriptor must
    # not be reused while that thread still reads it.
    with contextlib.suppress(OSError), _as_socket(connection) as end:
        end.shutdown(socket.SHUT_RDWR)
    process.wait()
