"""Handles Ctrl-C and SIGTERM: the step in progress is finished and saved before the run ends.

A checkpoint is a state between two steps, so the first signal waits for the end of the step; the second one does not.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from trimtab.errors import Stopped

SIGNALS = (signal.SIGINT, signal.SIGTERM)
WAITING = b"\nstopping: this step is finished and saved first; once more (Ctrl-C) to stop at once\n"


class Stop:
    """A request to end a run, from a signal or from `ask`. One for each run.

    `line` goes to standard error when a signal has to wait.
    """

    def __init__(self, line: bytes = WAITING) -> None:
        self.asked: int | None = None
        self._line = line
        self._finishing = False

    def ask(self, number: int = signal.SIGINT) -> None:
        """Have the run end after the step in progress. Any thread may call it."""
        self.asked = self.asked or number

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Inside, signals ask. Handlers of the program's own stay, and so do all of them outside the main thread."""
        mine = threading.current_thread() is threading.main_thread()
        defaults = (signal.SIG_DFL, signal.default_int_handler)
        taken = [number for number in SIGNALS if mine and signal.getsignal(number) in defaults]
        before = {number: signal.signal(number, self._receive) for number in taken}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """What the first signal waits for; elsewhere there is nothing to save, and it raises `Stopped` at once."""
        self._finishing = True
        try:
            yield
        finally:
            self._finishing = False

    def _receive(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        first = self.asked is None
        self.ask(number)  # also where it raises: an exception may be lost, in a destructor or an import
        if not self._finishing or not first:
            raise Stopped(number)
        # Not print: the interrupted code may be in the middle of one.
        os.write(2, self._line)
