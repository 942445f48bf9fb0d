"""Ports for servers that must be told theirs before they listen."""

from __future__ import annotations

import random
import socket


def free_port() -> int:
    """A port of loopback that nobody listens on.

    Below those that the system gives to whoever asks for any (32768 and up on Linux), one of which could go to another
    process before the server listens.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
