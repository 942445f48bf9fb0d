"""Messages between processes: what goes in comes out, with an open file, and no thread waits forever."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import socket
import threading
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
from tests.support.processes import gone

from trimtab.errors import DivergedError, EngineDeadError, TrimtabError
from trimtab.trainer import processes
from trimtab.trainer.processes import Message, Parent, WorkerProcess

pytestmark = pytest.mark.e2e  # children, and a second until one is given up


def through(content: Any, descriptor: int | None = None) -> Message:
    """Over a real connection, from a thread: messages are larger than its buffer."""
    near, far = multiprocessing.Pipe()
    with near, far:
        sender = threading.Thread(target=processes._send, args=(near, content, descriptor))
        sender.start()
        message = processes._receive(far)
        sender.join()
        assert not far.poll(0)  # nothing of the message is left
    return message


def identical(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def test_large_and_strided_arrays() -> None:
    big = np.arange(3_000_001, dtype=np.int64)[::-1]
    square = np.arange(12, dtype=np.float32).reshape(3, 4).T
    result = through({"big": big, "square": square}).content
    assert identical(result["big"], np.ascontiguousarray(big))
    assert identical(result["square"], np.ascontiguousarray(square))


@pytest.mark.parametrize("kind", [TrimtabError, DivergedError, EngineDeadError])
def test_a_users_error_arrives_as_itself(kind: type[TrimtabError]) -> None:
    error = through(kind("one line")).content
    assert type(error) is kind
    assert str(error) == "one line"


def test_messages_arrive_in_order_and_an_open_file_with_its_own() -> None:
    near, far = multiprocessing.Pipe()
    reader, writer = os.pipe()
    with near, far:
        processes._send(near, 1)
        processes._send(near, np.ones(3), reader)
        processes._send(near, 3)
        os.close(reader)
        messages = [processes._receive(far) for _ in range(3)]
    assert [message.descriptor is None for message in messages] == [True, False, True]
    copy = messages[1].descriptor
    os.write(writer, b"through")
    assert os.read(copy, 7) == b"through"
    assert not os.get_inheritable(copy)
    os.close(copy)
    os.close(writer)


@pytest.mark.parametrize("cut", [0, 3, 7, -1])
def test_a_connection_that_ends_early_is_an_error(cut: int) -> None:
    near, far = multiprocessing.Pipe()
    data = bytes(ForkingPickler.dumps((list(range(100)), False)))
    whole = len(data).to_bytes(4, "big") + data
    with far:
        os.write(near.fileno(), whole[:cut])
        near.close()
        with pytest.raises((EOFError, OSError)):
            processes._receive(far)


def echo() -> None:
    """The child of the tests below: it sends back what it gets, and does what a text says."""
    messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
    parent = Parent(messages.put, close=lambda: 1 / 0)  # an error of its last steps must not keep it alive
    print("last words", flush=True)
    while True:
        message = messages.get()
        if message.content == "hang":
            os.kill(os.getpid(), signal.SIGSTOP)
        if message.content == "stop in an answer":
            os.write(parent._connection.fileno(), (99).to_bytes(4, "big"))  # its length alone
        parent.send(message.content, message.descriptor)


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerProcess]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]))
    child = WorkerProcess(__name__)
    child.send("ready")
    assert child.receive() == Message("ready")
    yield child
    child.kill()


def test_a_thread_that_waits_is_woken_when_another_one_ends_the_child(child: WorkerProcess) -> None:
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            child.receive()
        except (EOFError, OSError) as error:
            raised.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    child.kill()
    waiting.join()
    assert len(raised) == 1
    assert gone(child.process.pid)
    assert child.exit_reason() == "was killed (by hand, or because memory ran out)"
    assert child.last_output() == ", last saying 'last words',"


@pytest.mark.parametrize(("number", "name"), [(signal.SIGTERM, "SIGTERM"), (34, "SIGRTMIN"), (40, "SIGRTMIN+6")])
def test_the_signal_that_ended_a_child_is_named(child: WorkerProcess, number: int, name: str) -> None:
    child.process.send_signal(number)
    assert child.exit_reason() == f"was killed by {name}"


def test_a_message_for_a_child_that_stands_still_is_given_up(
    child: WorkerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even in the middle of a message; the child is then ended, since the rest could not be told from the next one."""
    monkeypatch.setattr(processes, "TRANSFER_TIMEOUT", 1)
    processes._limit_transfers(child._connection)
    child.send("hang")
    with pytest.raises(BlockingIOError):
        child.send(bytes(1 << 24))
    assert gone(child.process.pid)


def test_an_answer_of_a_child_that_stands_still_is_given_up(
    child: WorkerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "TRANSFER_TIMEOUT", 1)
    processes._limit_transfers(child._connection)
    child.send("stop in an answer")
    with pytest.raises(BlockingIOError) as raised:
        child.receive()
    assert child.exit_reason(raised.value) == "moved no byte for 1 s"
    assert gone(child.process.pid)


def test_a_child_whose_last_steps_fail_ends_with_its_parent(child: WorkerProcess) -> None:
    with processes._as_socket(child._connection) as end:
        end.shutdown(socket.SHUT_WR)
    assert child.process.wait(10) == -signal.SIGKILL


if __name__ == "__main__":
    echo()
