"""Inference servers as tests start them: real processes, with requests over real sockets, killed with real signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any
from urllib.request import Request, urlopen

from trimtab.trainer.config import EngineConfig
from trimtab.trainer.engines.server.server_engine import ServerEngine
from trimtab.trainer.models.load import LoadedModel
from trimtab.trainer.sft import laboratory_folder

SCRIPT = str(Path(__file__).with_name("inference_server.py"))


class ServerProcess:
    """One server, forked from a `starter` process; it keeps its port when it is killed and started again."""

    def __init__(self, starter: IO[str], kind: str, folder: Path, home: Path, port: int = 0) -> None:
        home.mkdir()
        self.kind, self.port = kind, port
        self._starter, self._folder = starter, folder
        self._log, self._pipe = home / "requests", home / "events"
        self._log.touch()
        os.mkfifo(self._pipe)
        self._events: IO[str] | None = None
        self._pid = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def alive(self) -> bool:
        return self._events is not None

    def start(self) -> None:
        line = [self.kind, str(self._folder), str(self._log), str(self._pipe), self.port]
        self._starter.write(json.dumps(line) + "\n")
        self._starter.flush()
        self._events = self._pipe.open()
        self.port, self._pid = map(int, self._events.readline().split())

    def wait_for_held(self, count: int = 1) -> None:
        """Wait until the server holds back `count` more responses."""
        assert self._events is not None
        for _ in range(count):
            assert self._events.readline().strip() == "held"

    def configure(self, **options: Any) -> None:
        """Set the options of `inference_server.py`; events before that are dropped."""
        urlopen(Request(f"{self.url}/configure", json.dumps(options).encode()), timeout=30).close()
        assert self._events is not None
        while (line := self._events.readline().strip()) != "configured":
            assert line, "the server is dead"

    def kill(self) -> None:
        """Send SIGKILL and wait until the server is dead."""
        if self._events is not None:
            os.kill(self._pid, signal.SIGKILL)
            self._events.read()
            self._events.close()
            self._events = None

    def logged(self, event: str) -> list[int]:
        """Seeds of the requests that were `received`, or `answered`, in order."""
        lines = [json.loads(line) for line in self._log.read_text().splitlines()]
        return [line[event] for line in lines if event in line]

    def reset(self) -> None:
        """Default options and an empty log."""
        self.configure()
        self._log.write_text("")


@contextmanager
def starter() -> Iterator[IO[str]]:
    """The standard input of a process that starts servers; they end with it."""
    with subprocess.Popen([sys.executable, SCRIPT], stdin=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        yield process.stdin
        process.stdin.close()


def engine_over(
    laboratory: LoadedModel, served: Sequence[ServerProcess], folder: Path | None = None, **options: Any
) -> ServerEngine:
    """With the laboratory's own weights, published as version 0."""
    settings = {"urls": [one.url for one in served], "kind": served[0].kind, "reconnect_timeout": 30.0, "timeout": 60.0}
    settings |= {"folder": None if folder is None else str(folder)}
    config = EngineConfig.model_validate({"type": "server", "dtype": "float32", "server": settings | options})
    engine = ServerEngine(config.server.urls, laboratory.tokenizer, config, laboratory_folder())
    engine.update_weights(laboratory.model.named_parameters(), 0)
    return engine
