"""The points at which a program waits for its device, with the functions that led to each."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Event:
    """A wait for the device.

    kind: `copy` to the CPU, `read` of a value, or `shape` that depends on values; `wait` where the kind is not known.
    functions: of Trimtab on the stack, innermost first, as `file:function`.
    """

    kind: str
    functions: tuple[str, ...]


@dataclass
class Log:
    events: list[Event] = field(default_factory=list)

    def add(self, kind: str) -> None:
        frame, names = sys._getframe(1), []
        while frame is not None:
            path = frame.f_code.co_filename
            if "/src/trimtab/" in path:
                names.append(f"{path.rsplit('/trimtab/', 1)[1]}:{frame.f_code.co_name}")
            frame = frame.f_back
        self.events.append(Event(kind, tuple(names)))


LOG = Log()
