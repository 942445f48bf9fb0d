"""Handles Ctrl-C and SIGTERM: the first ends a run after the current step, with a checkpoint, the second at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from trimtab.errors import Stopped

SIGNALS = (signal.SIGINT, signal.SIGTERM)
WAITING_MESSAGE = b"\nstopping: this step is finished and saved first; once more (Ctrl-C) to stop at once\n"


class Stop:
    """A request to end a run, by a signal or by `request`. Each run has its own.

    `signal_number` is that of the signal, None until then. `line` is written to standard error if a signal has to wait.
    """

    def __init__(self, line: bytes = WAITING_MESSAGE) -> None:
        self.signal_number: int | None = None
        self._line = line
        self._finishing = False

    def request(self, number: int = signal.SIGINT) -> None:
        """Requests the end of the run after the step in progress. May be called from any thread."""
        self.signal_number = self.signal_number or number

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Handles signals inside, in the main thread; handlers that the program has set itself are kept."""
        in_main_thread = threading.current_thread() is threading.main_thread()
        defaults = (signal.SIG_DFL, signal.default_int_handler)
        handled = [number for number in SIGNALS if in_main_thread and signal.getsignal(number) in defaults]
        before = {number: signal.signal(number, self._receive) for number in handled}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """Inside, the first signal waits; outside there is nothing to save and it raises `Stopped` at once."""
        self._finishing = True
        try:
            yield
        finally:
            self._finishing = False

    def _receive(self, number: int, frame: FrameType | None) -> None:
        first = self.signal_number is None
        self.request(number)  # also before raising: an exception may be lost, in a destructor or an import
        if not self._finishing or not first:
            raise Stopped(number)
        # Not print: the interrupted code may be inside of print.
        os.write(2, self._line)
