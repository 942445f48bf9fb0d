"""The other side of a `RemoteEngine`: hosts one engine and answers calls.

`python -m trimtab.trainer.engines.remote.engine_host` is the process of a `ProcessTransport`: the main thread answers,
a second thread reads the connection and sends heartbeats.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trimtab.errors import TrimtabError

# Import nothing that imports torch: that takes seconds, during which no heartbeat is sent.
from trimtab.trainer.config import Config
from trimtab.trainer.engines.remote.hosted_turns import CallResult, EndedTurn, HandledTurn, HostedTurns
from trimtab.trainer.processes import Message, Parent
from trimtab.types import Completion, Engine

SHUTDOWN_TIMEOUT = 5.0  # seconds for the engine to close


class EngineHost:
    """Answers one call at a time. Meanwhile other threads may call `abort`, `handled` and `progress`.

    Subclasses define `update_weights`, `named_weights` and `send_turn`, which depend on the transport.
    """

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self._error: Exception | str | None = None
        self.steps = 0  # number of checks of the abort signal; see `progress`
        self.aborted = 0  # number of the last aborted call
        self._generating = False
        self._call = 0
        self._turns: HostedTurns | None = None

    def start(self, config: Config, folder: Path, threads: int) -> None:
        """Builds the engine. If that fails, the error is the answer to every call."""
        try:
            self.build(config, folder, threads)
        except Exception as error:
            self._error = _to_send(error)

    def build(self, config: Config, folder: Path, threads: int) -> None:
        import torch

        from trimtab.trainer.engines.factory import build_engine

        torch.set_num_threads(threads)
        self.engine = build_engine(config, folder)

    def answer(self, call: int, method: str, arguments: tuple[Any, ...]) -> CallResult:
        """Performs call number `call`."""
        value, error = None, self._error
        if self.engine is None:
            return value, error, (0, 0, 0)
        self._call = call
        try:
            value = getattr(self, method)(self.engine, *arguments)
        except Exception as raised:
            error = _to_send(raised)
        return value, error, (self.engine.policy_version, self.engine.decoded_tokens, self.engine.prefilled_tokens)

    def generate(
        self,
        engine: Engine,
        prompts: Any,
        samples: int,
        sampling: Any,
        seed: int,
        prefixes: Any,
        max_turn_tokens: int | None,
    ) -> list[list[Completion]]:
        """See `types.Engine`. `max_turn_tokens`: of the caller's `TurnHandler`; None if the call has no handler."""
        signal = _AbortSignal(self, self._call)
        turns = None if max_turn_tokens is None else HostedTurns(self._call, max_turn_tokens, self.send_turn)
        self._generating, self._turns = True, turns
        try:
            return engine.generate(prompts, samples, sampling, seed=seed, prefixes=prefixes, turns=turns, abort=signal)
        finally:
            self._generating, self._turns = False, None

    def prefill_logps(self, engine: Any, prompts: Any, completions: Any) -> Any:
        return engine.prefill_logps(prompts, completions)

    def weight_checksums(self, engine: Any) -> Any:
        return engine.weight_checksums() if hasattr(engine, "weight_checksums") else {}

    def send_turn(self, turn: EndedTurn) -> None:
        raise NotImplementedError

    def handled(self, turn: HandledTurn) -> None:
        """Receives the result of a turn that `send_turn` sent."""
        if (turns := self._turns) is not None:
            turns.handled(turn)

    def abort(self, call: int) -> None:
        """Sets the abort signal of call number `call`, even if that call has not begun."""
        self.aborted = max(self.aborted, call)

    def progress(self) -> int:
        """Returns a number that changes on every call unless a running `generate` has hung.

        Engines check the abort signal before every token and while they wait for results of turns. If the checks stop,
        the engine has hung, although its process is alive.
        """
        self.steps += not self._generating
        return self.steps


class _AbortSignal:
    """The abort signal of one call of a host (`types.AbortSignal`)."""

    def __init__(self, host: EngineHost, call: int) -> None:
        self._host, self._call = host, call

    def is_set(self) -> bool:
        self._host.steps += 1
        return self._host.aborted >= self._call


def _to_send(error: Exception) -> Exception | str:
    return error if isinstance(error, TrimtabError) else traceback.format_exc().rstrip()


class ProcessHost(EngineHost):
    """Hosts an engine for the parent process. Weights are sent and received as shared files (`weight_transfer.py`)."""

    def __init__(self) -> None:
        super().__init__()
        self._messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._busy = False
        self._closed = threading.Event()
        self._parent = Parent(
            self._receive, progress=lambda: self.progress() if self._busy else None, close=self._wait_for_close
        )

    def serve(self) -> None:
        """Answers calls until the parent is gone; the first message has the arguments of `start`."""
        message = self._messages.get()
        if message is not None:
            self.start(**message.content)
        while (message := self._messages.get()) is not None:
            call, method, arguments = message.content
            files = () if message.descriptor is None else (message.descriptor,)
            value, error, state = self.answer(call, method, (*files, *arguments))
            self._busy = False
            with contextlib.ExitStack() as cleanup:
                descriptor = None
                if method == "named_weights" and error is None:
                    shared = cleanup.enter_context(contextlib.closing(value))
                    descriptor, value = shared.descriptor, shared.entries
                self._parent.send((value, error, state), descriptor)
        if self.engine is not None:
            self.engine.close()
        self._closed.set()
        threading.Event().wait()  # `Parent` ends the process

    def update_weights(
        self, engine: Engine, descriptor: int, entries: Sequence[Any], version: int, as_is: bool
    ) -> None:
        from trimtab.trainer.engines.weight_transfer import SharedWeights

        with contextlib.closing(SharedWeights(descriptor, entries)) as shared:
            engine.update_weights(shared, version, as_is=as_is)

    def named_weights(self, engine: Engine) -> Any:
        from trimtab.trainer.engines.weight_transfer import share

        return share(engine.named_weights())

    def send_turn(self, turn: EndedTurn) -> None:
        self._parent.send(turn)

    def _receive(self, message: Message) -> None:
        if isinstance(message.content, HandledTurn):
            self.handled(message.content)
            return
        if isinstance(message.content, int):
            self.abort(message.content)
            return
        self._busy = isinstance(message.content, tuple)  # the first message gets no answer
        self._messages.put(message)

    def _wait_for_close(self) -> None:
        self._messages.put(None)
        self.abort(sys.maxsize)
        if self.engine is not None:
            self._closed.wait(SHUTDOWN_TIMEOUT)


def main() -> None:
    try:
        ProcessHost().serve()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # immediately: threads of the engine could delay a normal exit, for which the parent waits


if __name__ == "__main__":
    main()
