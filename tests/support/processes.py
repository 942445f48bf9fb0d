"""Processes that tests watch from outside: the kernel and other processes may be late, or faster than the watcher."""

from __future__ import annotations

import time
from contextlib import suppress

import psutil

ENDED = 60.0  # seconds after which a process that should have ended is a failure


def gone(pid: int) -> bool:
    """Whether it ends, within `ENDED`. An orphan may wait for its reaper: then it is a zombie, and gone as well."""
    end = time.monotonic() + ENDED
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        while process.status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > end:
                return False
            time.sleep(0.01)
    return True


def words(process: psutil.Process) -> list[str]:
    """The command it was started with; none if it is gone, or a zombie."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []
