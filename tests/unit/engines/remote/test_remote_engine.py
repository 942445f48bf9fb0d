"""Waiting for the engine's process to answer: what a test with a real one cannot time."""

from __future__ import annotations

import socket

import pytest

from trimtab.engines.remote import wire
from trimtab.engines.remote.remote_engine import WorkerProcess


def test_closed_by_another_thread_between_two_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """An `OSError`, which the caller turns into the engine's end; a closed socket cannot be waited for."""
    child = object.__new__(WorkerProcess)
    child.connection, theirs = socket.socketpair()
    child.connection.settimeout(5)
    receive = wire.receive

    def closing(connection: socket.socket) -> wire.Frame:
        frame = receive(connection)
        connection.close()
        return frame

    monkeypatch.setattr(wire, "receive", closing)
    with theirs:
        wire.send(theirs, {"alive": True})
        with pytest.raises(ConnectionError):
            child.wait_for_answer(None, 1)
