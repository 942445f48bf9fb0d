"""The process that hosts one engine for another process: `python -m trimtab.engines.remote.engine_host SOCKET PARENT`.

The first frame is the specification of the engine (`engine_spec.py`); every other one is a request, answered in order
by the main thread. A second thread reads the connection, so that an abort arrives while tokens are sampled, and sends a
heartbeat every second to a caller that waits for an answer. The process exits, with everything the engine started, when
the connection is closed or its parent has exited for any reason.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import socket
import sys
import threading
import traceback
from typing import Any

from trimtab.engines.remote import wire
from trimtab.errors import TrimtabError
from trimtab.types import Engine

HEARTBEAT_INTERVAL = 1.0  # seconds between heartbeats, and between checks of the parent
SHUTDOWN_TIMEOUT = 5.0  # seconds for the engine to close


class Request:
    """A frame to answer, and its abort signal (`types.AbortSignal`)."""

    def __init__(self, frame: wire.Frame) -> None:
        self.frame = frame
        self.answered = "do" not in frame.head  # the specification gets no answer
        self._abort = threading.Event()
        self._checked = False

    def interrupt(self) -> None:
        self._abort.set()

    def is_set(self) -> bool:
        self._checked = True
        return self._abort.is_set()

    def made_progress(self) -> bool:
        """Returns whether the engine has checked the abort signal since the last call.

        Engines check it before every token while they generate; one that no longer does hangs, although its process
        is alive. Other requests always count as progress.
        """
        checked, self._checked = self._checked, False
        return checked or self.frame.head.get("do") != "generate"


class EngineHost:
    """Hosts one engine: a thread that reads requests, and the main thread that answers them."""

    def __init__(self, connection: socket.socket, parent: int) -> None:
        self._connection, self._parent = connection, parent
        self._requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._latest: Request | None = None
        self._engine: Engine | None = None
        self._start_error: dict[str, str] = {}
        self._closed = threading.Event()
        self._sending = threading.Lock()

    def serve(self) -> None:
        threading.Thread(target=self._listen, daemon=True).start()
        described = self._requests.get()
        if described is not None:
            self._start(described.frame.head)
        while (request := self._requests.get()) is not None:
            self._answer(request)
        if self._engine is not None:
            self._engine.close()
        self._closed.set()
        threading.Event().wait()  # the listener ends the process

    def _listen(self) -> None:
        try:
            while self._parent_lives():
                if select.select([self._connection], [], [], HEARTBEAT_INTERVAL)[0]:
                    self._receive(wire.receive(self._connection))
                else:
                    self._send_heartbeat()
        except OSError:
            pass  # the parent closed the connection or exited
        except Exception:
            traceback.print_exc()
        finally:
            self._exit()

    def _parent_lives(self) -> bool:
        """Checks the parent itself: a process forked from it may hold the connection open after its exit."""
        return os.getppid() == self._parent

    def _send_heartbeat(self) -> None:
        request = self._latest
        # While an answer is being sent no heartbeat is needed, and this thread must not block: it watches the parent.
        if request is None or not request.made_progress() or not self._sending.acquire(blocking=False):
            return
        try:
            if not request.answered:
                wire.send(self._connection, {"alive": True})
        finally:
            self._sending.release()

    def _receive(self, frame: wire.Frame) -> None:
        if frame.head.get("do") != "interrupt":
            self._latest = Request(frame)
            self._requests.put(self._latest)
        elif self._latest is not None and self._latest.frame.head.get("call") == frame.head["call"]:
            self._latest.interrupt()

    def _exit(self) -> None:
        self._requests.put(None)
        if self._latest is not None:
            self._latest.interrupt()
        if self._engine is not None:
            self._closed.wait(SHUTDOWN_TIMEOUT)
        os.killpg(0, signal.SIGKILL)  # this process leads a process group of everything the engine started

    def _start(self, spec: dict[str, Any]) -> None:
        try:
            from trimtab.engines.engine_spec import build

            if "threads" in spec:
                _use_threads(spec["threads"])
            self._engine = build(spec)
        except Exception as error:  # raised at the first request
            self._start_error = _describe_error(error)

    def _answer(self, request: Request) -> None:
        head: dict[str, Any] = {"error": self._start_error}
        arrays: wire.Arrays = {}
        with contextlib.ExitStack() as cleanup:
            files: list[int] = []
            if self._engine is not None:
                try:
                    head, arrays, files = self._perform(self._engine, request, cleanup)
                except Exception as error:
                    head = {"error": _describe_error(error)}
                engine = self._engine
                head["state"] = [engine.policy_version, engine.decoded, engine.prefilled]
            with self._sending:
                request.answered = True
                wire.send(self._connection, head, arrays, files)

    def _perform(
        self, engine: Engine, request: Request, cleanup: contextlib.ExitStack
    ) -> tuple[dict[str, Any], wire.Arrays, list[int]]:
        head, arrays = request.frame.head, request.frame.arrays
        if head["do"] == "generate":
            prefixes = None if head["prefixes"] is None else wire.unpack_completions(head["prefixes"], arrays)
            groups = engine.generate(
                wire.unpack_prompts(head["prompts"], arrays),
                head["samples"],
                wire.unpack_sampling(head["sampling"]),
                seed=head["seed"],
                prefixes=prefixes,
                interrupt=request,
            )
            described, packed = wire.pack_completions(groups)
            return {"groups": described}, packed, []
        from trimtab.engines.remote.shared_weights import SharedWeights, share

        if head["do"] == "publish":
            shared = SharedWeights(request.frame.files[0], head["entries"])
            cleanup.enter_context(contextlib.closing(shared))
            engine.publish(shared, head["version"], exact=head["exact"])
            return {}, {}, []
        shared = share(engine.weights())
        cleanup.enter_context(contextlib.closing(shared))
        return {"entries": shared.entries}, {}, [shared.descriptor]


def _use_threads(count: int) -> None:
    import torch

    torch.set_num_threads(count)


def _describe_error(error: Exception) -> dict[str, str]:
    """Returns a `TrimtabError` as its type and message, any other exception as its traceback."""
    if isinstance(error, TrimtabError):
        return {"type": type(error).__name__, "text": str(error)}
    return {"type": "defect", "text": traceback.format_exc().rstrip()}


def main() -> None:
    connection, parent = sys.argv[1:]
    try:
        EngineHost(socket.socket(fileno=int(connection)), int(parent)).serve()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # immediately: threads of the engine could delay a normal exit, for which the parent waits


if __name__ == "__main__":
    main()
