"""Runs `trimtab eval` and kills this process at a chosen moment: `between` batches, or `inside` the write of one.

Usage: eval_killed.py MOMENT BATCHES WORD...
"""

from __future__ import annotations

import os
import signal
import sys

from trimtab.cli.main import run
from trimtab.runs import atomic


def main(moment: str, batches: int, words: list[str]) -> int:
    append, written = atomic.append, 0

    def killing(descriptor: int, data: bytes) -> None:
        nonlocal written
        written += 1
        if moment == "inside" and written == batches:
            os.write(descriptor, data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        append(descriptor, data)
        if moment == "between" and written == batches:
            os.kill(os.getpid(), signal.SIGKILL)

    atomic.append = killing
    return run(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
