"""Calls a second of the Python sandboxes, and what a first call costs.

    .venv/bin/python benchmarks/sandbox.py [--workers 2] [--seconds 5] [--packages sympy numpy]

Threads run `1 + 1` at the same time, four a worker. "One session" keeps its session for all calls, "a session a call"
opens one for each, as an episode with a single call does. The time of a single call is a median over one thread.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Sequence
from typing import get_args

from shared import options_of
from trimtab.trainer.sandbox.code_result import CodeResult
from trimtab.trainer.sandbox.python_pool import PythonPool, PythonSession, SandboxName, sandbox_unavailable

CODE, RESULT = "1 + 1", CodeResult("2\n")
THREADS_PER_WORKER = 4
SINGLE_CALLS = 50


def main() -> None:
    parser = options_of(__doc__, workers=2, seconds=5.0)
    parser.add_argument("--packages", nargs="*", default=[], help="for bubblewrap")
    options = parser.parse_args()
    print("| sandbox | start, s | one call, ms | calls/s, one session | calls/s, a session a call |")
    print("|---|---|---|---|---|")
    for sandbox in get_args(SandboxName):
        if missing := sandbox_unavailable(sandbox):
            print(f"{sandbox}: {missing}")
            continue
        packages = options.packages if sandbox == "bubblewrap" else []
        print(row(sandbox, packages, options.workers, options.seconds), flush=True)


def row(sandbox: SandboxName, packages: Sequence[str], workers: int, seconds: float) -> str:
    begin = time.perf_counter()
    with PythonPool(sandbox, workers=workers, packages=packages, timeout=60.0) as pool:
        start = time.perf_counter() - begin
        with pool.session() as session:
            single = statistics.median(timed_call(session) for _ in range(SINGLE_CALLS))
        threads = THREADS_PER_WORKER * workers
        kept, fresh = (rate(pool, threads, seconds, keep=keep) for keep in (True, False))
    return f"| {sandbox} | {start:.2f} | {1000 * single:.1f} | {kept:.0f} | {fresh:.0f} |"


def timed_call(session: PythonSession) -> float:
    begin = time.perf_counter()
    assert session.run(CODE) == RESULT
    return time.perf_counter() - begin


def rate(pool: PythonPool, threads: int, seconds: float, *, keep: bool) -> float:
    """Returns the calls a second of many threads together."""
    end = time.perf_counter() + seconds
    counts = [0] * threads

    def episode(index: int) -> None:
        while time.perf_counter() < end:
            with pool.session() as session:
                while time.perf_counter() < end:
                    assert session.run(CODE) == RESULT
                    counts[index] += 1
                    if not keep:
                        break

    running = [threading.Thread(target=episode, args=(index,)) for index in range(threads)]
    begin = time.perf_counter()
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return sum(counts) / (time.perf_counter() - begin)


if __name__ == "__main__":
    main()
