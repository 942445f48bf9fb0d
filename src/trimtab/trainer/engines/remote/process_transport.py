"""An `EngineHost` in a child process of this machine."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, NoReturn

from trimtab.trainer.config import Config
from trimtab.trainer.engines.remote.hosted_turns import CallResult, EndedTurn, HandledTurn
from trimtab.trainer.engines.remote.remote_engine import TransportLost
from trimtab.trainer.engines.weight_transfer import SharedWeights, share
from trimtab.trainer.processes import WorkerProcess

WORKER = "trimtab.trainer.engines.remote.engine_host"
SHUTDOWN_TIMEOUT = 10.0  # seconds for the process to exit


class ProcessTransport:
    """Runs an engine in a child process, which starts at once and loads while the caller continues.

    Implements `remote_engine.Transport`. The terminal does not show the output of the process; if the process dies, the
    error quotes the last line.

    config, folder: the arguments of `factory.build_engine`. threads: number of CPU threads that the engine may use.
    devices: CUDA_VISIBLE_DEVICES of the process; None: as in this process.
    """

    def __init__(self, config: Config, folder: Path, *, threads: int, devices: str | None = None) -> None:
        self._start = {"config": config, "folder": folder.absolute(), "threads": threads}
        self._environment = {"OMP_NUM_THREADS": str(threads)}
        if devices is not None:
            self._environment["CUDA_VISIBLE_DEVICES"] = devices
        self.restart()

    def restart(self) -> None:
        self.turns: list[EndedTurn] = []
        self._process = WorkerProcess(WORKER, environment=self._environment)
        with contextlib.suppress(OSError):  # the process has died already: the first call reports that
            self._process.send(self._start)

    @property
    def pid(self) -> int:
        return self._process.process.pid

    @property
    def progress(self) -> int:
        return self._process.progress

    def submit(self, call: int, method: str, *arguments: Any) -> None:
        """`SharedWeights` are passed on directly; other weights are copied to a shared file first."""
        descriptor = None
        with contextlib.ExitStack() as cleanup:  # a caught error must not keep a copy of the model open
            if method == "update_weights":
                weights, *rest = arguments
                if not isinstance(weights, SharedWeights):
                    weights = cleanup.enter_context(contextlib.closing(share(weights)))
                descriptor, arguments = weights.descriptor, (weights.entries, *rest)
            try:
                self._process.send((call, method, arguments), descriptor)
            except OSError as error:
                self._lose(error)

    def wait(self, seconds: float) -> CallResult | None:
        try:
            message = self._process.receive(seconds)
        except (EOFError, OSError) as error:
            self._lose(error)
        if message is None:
            return None
        if isinstance(message.content, EndedTurn):
            self.turns.append(message.content)
            return None
        value, error, state = message.content
        if message.descriptor is not None:
            with contextlib.closing(SharedWeights(message.descriptor, value)) as shared:
                value = list(shared)
        return value, error, state

    def send_result(self, turn: HandledTurn) -> None:
        self._tell(turn)

    def abort(self, call: int) -> None:
        self._tell(call)

    def _tell(self, content: HandledTurn | int) -> None:
        with contextlib.suppress(OSError):  # the process has died: `wait` reports that
            self._process.send(content)

    def describe(self, what: str) -> str:
        return f"the engine's process {what}{self._process.last_output()}"

    def _lose(self, error: Exception) -> NoReturn:
        self._process.kill()
        raise TransportLost(self.describe(self._process.exit_reason(error))) from None

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        self._process.close(SHUTDOWN_TIMEOUT)
