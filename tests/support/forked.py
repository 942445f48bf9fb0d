"""Programs run in processes that are forked from one that has imported what takes seconds: torch, TRL, the trainer.

    with forked.starter("torch", "trimtab.cli.main") as run:
        done = run("-m", "trimtab", "train", "laboratory", cwd=folder)

Each program has a process of its own, which begins as `python WORDS` does: its arguments, folder, environment, standard
streams and exit code are its own. What the environment changes while a module is imported goes into `starter`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Run:
    """Runs `python WORDS`, a script or `-m MODULE` with its arguments, and waits; kills it after `timeout` seconds.

    With `ranks` there are that many processes, with the variables that torchrun sets; what they print is in this order.
    """

    server: subprocess.Popen[str]
    folder: Path

    def __call__(
        self, *words: object, cwd: Path | None = None, timeout: int = 600, ranks: int = 1, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        given, streams = [str(word) for word in words], [f"{self.folder}/{name}" for name in ("out", "err")]
        if ranks > 1:
            from tests.support.ports import free_port  # not where this file is the program

            port = str(free_port())
            variables |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        self.server.stdin.write(json.dumps([given, str(cwd or Path.cwd()), variables, streams, timeout, ranks]) + "\n")
        self.server.stdin.flush()
        code = int(self.server.stdout.readline())
        printed = ("".join(Path(f"{stream}{rank}").read_text() for rank in range(ranks)) for stream in streams)
        return subprocess.CompletedProcess(given, code, *printed)


@contextlib.contextmanager
def starter(
    *modules: str, python: Path | str = sys.executable, environment: Mapping[str, str] | None = None
) -> Iterator[Run]:
    """A process of `python` that has imported `modules`; programs add variables to its environment.

    Raises:
        RuntimeError: a module cannot be imported.
    """
    base = {**(os.environ if environment is None else environment), "OMP_NUM_THREADS": "1"}
    command = [str(python), __file__, *modules]
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=base) as server,
    ):
        assert server.stdin is not None
        assert server.stdout is not None
        if server.stdout.readline() != "ready\n":
            raise RuntimeError(f"{python} ended with {server.wait()} when it imported {', '.join(modules)}")
        yield Run(server, Path(folder))
        server.stdin.close()


def main() -> None:
    """Import the modules that are named, then start a program for every line of the standard input."""
    del sys.path[0]  # the folder of this file, whose modules have names of their own
    for module in sys.argv[1:]:
        importlib.import_module(module)
    gc.freeze()
    print("ready", flush=True)
    while request := sys.stdin.readline():
        if os.fork() == 0:
            begin(*json.loads(request))
            return
        print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)


def begin(words: list[str], cwd: str, variables: dict[str, str], streams: list[str], timeout: int, ranks: int) -> None:
    """In the forked process: run the program, and let through what it raises."""
    os.environ.update(variables)
    rank = as_rank(ranks) if ranks > 1 else 0
    signal.alarm(timeout)  # which ends the process: nothing handles it
    os.chdir(cwd)
    for number, path in enumerate((os.devnull, *(f"{stream}{rank}" for stream in streams))):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600), number)
    folder = cwd if words[0] == "-m" else str(Path(words[0]).resolve().parent)
    sys.path[:0] = [folder, *filter(None, variables.get("PYTHONPATH", "").split(os.pathsep))]
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


def as_rank(count: int) -> int:
    """Returns the rank in each of `count` new processes; this one ends with them, and ends them all if one fails."""
    ranks = []
    for rank in range(count):
        if (child := os.fork()) == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            return rank
        ranks.append(child)
    while ranks:
        ended, status = os.wait()
        ranks.remove(ended)
        if status != 0:
            for other in ranks:
                os.kill(other, signal.SIGKILL)
            os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
