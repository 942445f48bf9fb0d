"""Inference servers as tests start them: real processes, asked over real sockets, killed with real signals."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

SCRIPT = str(Path(__file__).with_name("inference_server.py"))


class Served:
    """One running `inference_server.py`."""

    def __init__(self, kind: str, folder: Path, diary: Path, port: int = 0) -> None:
        self.kind, self.folder, self.diary = kind, folder, diary
        self.port = port
        self.process: subprocess.Popen[str] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Where it was before, if it ran before."""
        command = [sys.executable, SCRIPT, self.kind, str(self.folder), str(self.diary), str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        word, _, port = self.line().partition(" ")
        assert word == "port"
        self.port = int(port)

    def line(self) -> str:
        assert self.process is not None
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the server ended"
        return line.strip()

    def holds(self, count: int = 1) -> None:
        """Wait until it holds so many responses."""
        for _ in range(count):
            assert self.line() == "holding"

    def behave(self, **options: Any) -> None:
        urlopen(Request(f"{self.url}/behave", json.dumps(options).encode()), timeout=30).close()

    def kill(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()
            self.process = None

    def noted(self, what: str) -> list[int]:
        """Seeds of the requests that were `asked`, or `answered`, in order."""
        lines = [json.loads(line) for line in self.diary.read_text().splitlines()]
        return [line[what] for line in lines if what in line]

    def forget(self) -> None:
        self.behave()
        self.diary.write_text("")
