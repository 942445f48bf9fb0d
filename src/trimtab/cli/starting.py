"""Ends the process without a traceback when Ctrl-C arrives while the command line is being imported."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


def guard() -> None:
    """From here to `release` Ctrl-C ends the process at once, unless the program handles or ignores it already."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def release() -> None:
    """From here on `KeyboardInterrupt` is caught."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def guarded() -> Iterator[None]:
    """For imports of seconds in the middle of a command. Inside them `KeyboardInterrupt` may even be lost."""
    guard()
    try:
        yield
    finally:
        release()


def _leave(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    os.write(2, b"\ntrimtab: interrupted; nothing had been started\n")
    os._exit(128 + number)
