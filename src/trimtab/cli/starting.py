"""Ends the process without a traceback if Ctrl-C arrives while modules are being imported."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


def guard() -> None:
    """Make Ctrl-C end the process immediately until `release`, unless the program already handles or ignores it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)


def release() -> None:
    """Restore the default handler, so that Ctrl-C raises `KeyboardInterrupt`."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def guarded() -> Iterator[None]:
    """Guards a block of slow imports, during which `KeyboardInterrupt` might be lost."""
    guard()
    try:
        yield
    finally:
        release()


def _exit(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    os.write(2, b"\ntrimtab: interrupted; nothing had been started\n")
    os._exit(128 + number)
