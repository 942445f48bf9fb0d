"""A process that starts an engine in a child, says so, and then waits to be killed: `worker_parent.py FOLDER STATE`.

STATE: `busy` in the middle of generating; `forked` right after the start, with another child that holds copies of
everything open.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from trimtab.trainer.config import load_config
from trimtab.trainer.engines.remote.process_transport import ProcessTransport
from trimtab.trainer.engines.remote.remote_engine import RemoteEngine
from trimtab.types import SamplingParams


class Announced:
    """Never set; reports once that a caller waits for an answer."""

    def __init__(self, words: str) -> None:
        self.words = words

    def is_set(self) -> bool:
        if self.words:
            print(self.words, flush=True)
        self.words = ""
        return False


def main() -> None:
    folder, state = sys.argv[1:]
    recipe = load_config("laboratory", ["engine.dtype=float32"])
    engine = RemoteEngine(ProcessTransport(recipe, Path(folder), threads=1))
    if state == "forked":
        if (helper := os.fork()) == 0:
            signal.pause()
        print(engine.transport.pid, helper, flush=True)
        signal.pause()
    generate(engine)


def generate(engine: RemoteEngine) -> None:
    from tests.support.engines import prompt

    from trimtab.trainer.models import laboratory

    engine.update_weights(laboratory.build(0)[0].named_parameters(), version=1)
    words, long = f"{engine.transport.pid} {os.getpid()}", SamplingParams(max_tokens=40, ignore_stop=True)
    while True:
        engine.generate([prompt([1, 2, 3])] * 64, 16, long, seed=0, abort=Announced(words))
        words = ""


if __name__ == "__main__":
    main()
