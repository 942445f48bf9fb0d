"""A process that starts an engine in a child, says so, and then waits to be killed: `worker_parent.py FOLDER STATE`.

STATE: `idle` after a publication, `busy` in the middle of generating, `starting` right after the start, `forked` with
another child that holds copies of everything open.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import torch
from tests.unit.rollout.support import prompt

from trimtab.models import laboratory
from trimtab.rollout.remote import WorkerEngine
from trimtab.types import Sampling


class Announced:
    """Never set; says once that somebody waits for an answer."""

    def __init__(self, words: str) -> None:
        self.words = words

    def is_set(self) -> bool:
        if self.words:
            print(self.words, flush=True)
        self.words = ""
        return False


def main() -> None:
    folder, state = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    spec = {"type": "embedded", "model": str(folder), "dtype": "float32", "rounding": {}}
    engine = WorkerEngine(spec, threads=1)
    helper = os.getpid()
    if state == "forked" and (helper := os.fork()) == 0:
        signal.pause()
    words = f"{engine.pid} {helper}"
    if state != "starting":
        engine.publish(laboratory.build(0)[0].named_parameters(), version=1)
    if state == "busy":
        forever = Sampling(max_tokens=40, ignore_stop=True)
        while True:
            engine.generate([prompt([1, 2, 3])] * 64, 16, forever, seed=0, interrupt=Announced(words))
            words = ""
    print(words, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
