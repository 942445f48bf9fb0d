"""The process that hosts one engine for another process: `python -m trimtab.engines.remote.engine_host SOCKET PARENT`.

The first frame describes the engine (`engine_spec.py`); every other one is a request, answered in order by the main
thread. A second thread reads the connection, so that an interruption arrives while tokens are sampled, and gives a sign
of life every second to a caller that waits for an answer. The process ends, with everything the engine started, once
the connection is closed or its parent is gone, however the parent ended.
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

LOOK = 1.0  # seconds between looks at the parent, and between signs of life
GRACE = 5.0  # seconds for the engine to end in good order


class Request:
    """A frame to answer, and the wish that it be answered soon (`types.AbortSignal`)."""

    def __init__(self, frame: wire.Frame) -> None:
        self.frame = frame
        self.answered = "do" not in frame.head  # the description is not answered
        self._wish = threading.Event()
        self._looked = False

    def interrupt(self) -> None:
        self._wish.set()

    def is_set(self) -> bool:
        self._looked = True
        return self._wish.is_set()

    def progress(self) -> bool:
        """Whether the engine was seen at work since the last call, which is known only while it generates.

        It looks at the wish before every token: one that no longer does is stuck, though its process lives.
        """
        looked, self._looked = self._looked, False
        return looked or self.frame.head.get("do") != "generate"


class Host:
    """The engine and the two ends of its work: requests that wait, and the connection that answers go to."""

    def __init__(self, connection: socket.socket, parent: int) -> None:
        self._connection, self._parent = connection, parent
        self._requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._latest: Request | None = None
        self._engine: Engine | None = None
        self._refusal: dict[str, str] = {}
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
                if select.select([self._connection], [], [], LOOK)[0]:
                    self._take(wire.receive(self._connection))
                else:
                    self._give_sign()
        except OSError:
            pass  # closed by the parent, or with it
        except Exception:
            traceback.print_exc()
        finally:
            self._leave()

    def _parent_lives(self) -> bool:
        """A connection outlives the parent where a process forked from it still holds its end."""
        return os.getppid() == self._parent

    def _give_sign(self) -> None:
        request = self._latest
        # While an answer is on its way no sign is needed, and this thread must stay free to see the parent die.
        if request is None or not request.progress() or not self._sending.acquire(blocking=False):
            return
        try:
            if not request.answered:
                wire.send(self._connection, {"alive": True})
        finally:
            self._sending.release()

    def _take(self, frame: wire.Frame) -> None:
        if frame.head.get("do") != "interrupt":
            self._latest = Request(frame)
            self._requests.put(self._latest)
        elif self._latest is not None and self._latest.frame.head.get("call") == frame.head["call"]:
            self._latest.interrupt()

    def _leave(self) -> None:
        self._requests.put(None)
        if self._latest is not None:
            self._latest.interrupt()
        if self._engine is not None:
            self._closed.wait(GRACE)
        os.killpg(0, signal.SIGKILL)  # this process leads a group of its own, of whatever the engine started

    def _start(self, spec: dict[str, Any]) -> None:
        try:
            from trimtab.engines.engine_spec import build

            if "threads" in spec:
                _use_threads(spec["threads"])
            self._engine = build(spec)
        except Exception as error:  # raised at the first request
            self._refusal = _described(error)

    def _answer(self, request: Request) -> None:
        head: dict[str, Any] = {"error": self._refusal}
        arrays: wire.Arrays = {}
        with contextlib.ExitStack() as cleanup:
            files: list[int] = []
            if self._engine is not None:
                try:
                    head, arrays, files = self._perform(self._engine, request, cleanup)
                except Exception as error:
                    head = {"error": _described(error)}
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
            described, found = wire.pack_completions(groups)
            return {"groups": described}, found, []
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


def _described(error: Exception) -> dict[str, str]:
    """A user's mistake travels as its type and its line; a defect as its traceback."""
    if isinstance(error, TrimtabError):
        return {"type": type(error).__name__, "text": str(error)}
    return {"type": "defect", "text": traceback.format_exc().rstrip()}


def main() -> None:
    connection, parent = sys.argv[1:]
    try:
        Host(socket.socket(fileno=int(connection)), int(parent)).serve()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # at once: what the engine started could keep an orderly exit, and so the parent, waiting


if __name__ == "__main__":
    main()
