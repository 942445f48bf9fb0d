"""Runs `trimtab eval` and kills this process at a chosen moment: `between` batches, or `inside` the write of one.

Usage: eval_killed.py MOMENT BATCHES WORD...
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from trimtab.cli.main import run
from trimtab.evaluation.result_store import PartFile


def main(moment: str, batches: int, words: list[str]) -> int:
    append, written = PartFile._append, 0

    def killing(self: PartFile, data: bytes, **more: Any) -> None:
        nonlocal written
        written += 1
        if moment == "inside" and written == batches:
            with self.path.open("ab", buffering=0) as file:
                file.write(data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        append(self, data, **more)
        if moment == "between" and written == batches:
            os.kill(os.getpid(), signal.SIGKILL)

    PartFile._append = killing  # type: ignore[method-assign]
    return run(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
