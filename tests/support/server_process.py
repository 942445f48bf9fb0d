"""Inference servers as tests start them: real processes, asked over real sockets, killed with real signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any
from urllib.request import Request, urlopen

SCRIPT = str(Path(__file__).with_name("inference_server.py"))


class Served:
    """One server, forked from a `starter` process; it keeps its port when it is killed and started again."""

    def __init__(self, starter: IO[str], kind: str, folder: Path, home: Path, port: int = 0) -> None:
        home.mkdir()
        self.kind, self.port = kind, port
        self._starter, self._folder = starter, folder
        self._diary, self._says = home / "diary", home / "says"
        self._diary.touch()
        os.mkfifo(self._says)
        self._said: IO[str] | None = None
        self._pid = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def alive(self) -> bool:
        return self._said is not None

    def start(self) -> None:
        line = [self.kind, str(self._folder), str(self._diary), str(self._says), self.port]
        self._starter.write(json.dumps(line) + "\n")
        self._starter.flush()
        self._said = self._says.open()
        self.port, self._pid = map(int, self._said.readline().split())

    def holds(self, count: int = 1) -> None:
        """Wait until it holds so many responses."""
        assert self._said is not None
        for _ in range(count):
            assert self._said.readline().strip() == "holding"

    def behave(self, **options: Any) -> None:
        """See `inference_server.py`; what it said before is forgotten."""
        urlopen(Request(f"{self.url}/behave", json.dumps(options).encode()), timeout=30).close()
        assert self._said is not None
        while (line := self._said.readline().strip()) != "behaving":
            assert line, "the server is dead"

    def kill(self) -> None:
        """SIGKILL; when this returns it is dead."""
        if self._said is not None:
            os.kill(self._pid, signal.SIGKILL)
            self._said.read()
            self._said.close()
            self._said = None

    def noted(self, what: str) -> list[int]:
        """Seeds of the requests that were `asked`, or `answered`, in order."""
        lines = [json.loads(line) for line in self._diary.read_text().splitlines()]
        return [line[what] for line in lines if what in line]

    def forget(self) -> None:
        self.behave()
        self._diary.write_text("")


@contextmanager
def starter() -> Iterator[IO[str]]:
    """The standard input of a process that starts servers; they end with it."""
    with subprocess.Popen([sys.executable, SCRIPT], stdin=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        yield process.stdin
        process.stdin.close()
