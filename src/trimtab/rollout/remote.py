"""An engine in a process of its own: generation does not share the trainer's interpreter, threads or fate."""

from __future__ import annotations

import contextlib
import itertools
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from trimtab.errors import Diverged, EngineLost, TrimtabError
from trimtab.rollout import wire
from trimtab.rollout.handover import SharedWeights, share
from trimtab.rollout.rows import Prefixes, check_prefixes
from trimtab.types import Completion, Interrupt, Prompt, Sampling

LOOK = 0.01  # seconds between looks at an interrupt
GRACE = 10.0  # seconds for the process to end in good order
LAST_WORDS = 4096  # bytes of what it printed that are searched for its last line
_ERRORS: dict[str, type[TrimtabError]] = {kind.__name__: kind for kind in (TrimtabError, Diverged, EngineLost)}


class WorkerEngine:
    """The engine that `spec` describes (`hosted.build`), in a child process (`types.Engine`).

    The process starts at once and loads while the caller goes on; mistakes in `spec` are raised by the first call.
    Weights must be published before anything is generated. With as many threads, tokens and log-probs have the bits of
    the same engine in this process. What the process prints is kept out of the terminal; its last line is quoted when
    it dies.

    Args:
        spec: JSON; see `hosted.py`.
        threads: processor threads the engine may use.
        devices: CUDA_VISIBLE_DEVICES of the process; None: those of this one.
    """

    def __init__(
        self,
        spec: Mapping[str, Any],
        *,
        threads: int,
        devices: str | None = None,
    ) -> None:
        self.policy_version = 0
        self.decoded = 0
        self.prefilled = 0
        self._spec = {**spec, "threads": threads}
        self._environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        if devices is not None:
            self._environment["CUDA_VISIBLE_DEVICES"] = devices
        self._calls = itertools.count()
        self._child: _Child | None = None
        self._closed = False
        self.recover()

    @property
    def pid(self) -> int | None:
        """The child's process id; None while there is no child."""
        return None if self._child is None else self._child.process.pid

    def generate(
        self,
        prompts: Sequence[Prompt],
        samples: int,
        sampling: Sampling,
        *,
        seed: int,
        prefixes: Prefixes | None = None,
        interrupt: Interrupt | None = None,
    ) -> list[list[Completion]]:
        """See `types.Engine`. `interrupt` is looked at every 10 ms and takes effect at the next token.

        Raises:
            EngineLost: the process died.
            TrimtabError: what the hosted engine refuses; no weights were published yet.
        """
        check_prefixes(prefixes, prompts, samples, sampling)
        if not self._has_weights:
            raise TrimtabError("the engine's process holds no weights yet: publish before generating")
        names, arrays = wire.pack_prompts(prompts)
        begun = None
        if prefixes is not None:
            begun, more = wire.pack_completions(prefixes)
            arrays |= more
        head = {
            "samples": samples,
            "sampling": wire.pack_sampling(sampling),
            "seed": seed,
            "prompts": names,
            "prefixes": begun,
        }
        frame = self._ask("generate", head, arrays, interrupt=interrupt)
        return wire.unpack_completions(frame.head["groups"], frame.arrays)

    def publish(self, weights: Iterable[tuple[str, Any]], version: int, *, exact: bool = False) -> None:
        """See `types.Engine`. `SharedWeights` are handed over as they are; anything else is written for this call.

        Raises:
            EngineLost: the process died; whether it had taken the weights does not matter, a new one has none.
            TrimtabError: what the hosted engine refuses; there is no memory for the handover.
        """
        shared = weights if isinstance(weights, SharedWeights) else share(weights)
        head = {"version": version, "exact": exact, "entries": shared.entries}
        self._ask("publish", head, files=[shared.descriptor])
        self._has_weights = True

    def weights(self) -> list[tuple[str, Any]]:
        """Copies of the weights in use."""
        frame = self._ask("weights", {})
        shared = SharedWeights(frame.files[0], frame.head["entries"])
        try:
            return list(shared)
        finally:
            shared.close()

    def recover(self) -> None:
        """Start another process where there is none; it has no weights, and `policy_version` is 0 again.

        Raises:
            TrimtabError: the engine was closed.
        """
        if self._closed:
            raise TrimtabError("the engine was closed: build another one")
        if self._child is None:
            self._child = _Child(self._spec, self._environment)
            self._has_weights = False
            self._before = (self.decoded, self.prefilled)
            self.policy_version = 0

    def close(self) -> None:
        """End the process and all it started. Another thread's call in progress raises `EngineLost`."""
        self._closed = True
        child, self._child = self._child, None
        if child is not None:
            child.close()

    def _ask(
        self,
        doing: str,
        head: Mapping[str, Any],
        arrays: wire.Arrays | None = None,
        files: Sequence[int] = (),
        interrupt: Interrupt | None = None,
    ) -> wire.Frame:
        child, call = self._child, next(self._calls)
        if child is None:
            raise EngineLost("the engine's process is gone: recover the engine, then publish weights")
        try:
            wire.send(child.connection, {"do": doing, "call": call, **head}, arrays, files)
            if interrupt is not None:
                _watch(child.connection, interrupt, call)
            frame = wire.receive(child.connection)
        except OSError:
            self._lose(child, doing)
        except BaseException:
            # Whatever stopped this call, its answer must not be taken for the next one's.
            self._child = None
            child.end()
            raise
        if self._closed:
            raise EngineLost(f"the engine was closed during {doing}")
        self._note(frame.head)
        return frame

    def _note(self, head: Mapping[str, Any]) -> None:
        if "state" in head:
            self.policy_version, decoded, prefilled = head["state"]
            self.decoded, self.prefilled = self._before[0] + decoded, self._before[1] + prefilled
        if "error" not in head:
            return
        kind, text = head["error"]["type"], head["error"]["text"]
        if kind == EngineLost.__name__ and self._child is not None:
            # What it hosted is dead; a new process is the way back.
            child, self._child = self._child, None
            child.close()
        if kind in _ERRORS:
            raise _ERRORS[kind](text)
        raise RuntimeError(f"the engine's process failed:\n{text}")

    def _lose(self, child: _Child, doing: str) -> NoReturn:
        self._child = None
        child.end()
        raise EngineLost(f"the engine's process {child.fate()} during {doing}")


class _Child:
    """The process, our end of its connection, and what it prints (into a deleted file)."""

    def __init__(self, spec: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        self.connection, theirs = socket.socketpair()
        with tempfile.TemporaryFile() as log:
            self._log = os.dup(log.fileno())
        weakref.finalize(self, os.close, self._log)
        with theirs:
            self.process = subprocess.Popen(
                # -P: no module in the working directory may take the place of an installed one.
                [sys.executable, "-P", "-m", "trimtab.rollout.worker", str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=environment,
                start_new_session=True,  # Ctrl-C is the trainer's to handle
            )
        self.end = weakref.finalize(self, _end, self.connection, self.process, os.getpid())
        with contextlib.suppress(OSError):  # it is dead already: the first call says so
            wire.send(self.connection, spec)

    def close(self) -> None:
        """Let the engine end in good order, but not for long."""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self.connection.shutdown(socket.SHUT_WR)
            self.process.wait(GRACE)
        self.end()

    def fate(self) -> str:
        """How it ended, with its last line."""
        code = self.process.wait()
        if code == -signal.SIGKILL:
            how = "was killed (memory ran out, or somebody killed it)"
        elif code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"ended with exit code {code}"
        size = os.fstat(self._log).st_size
        words = os.pread(self._log, LAST_WORDS, max(0, size - LAST_WORDS)).decode(errors="replace")
        lines = words.strip().splitlines()
        return f"{how}, last saying {lines[-1].strip()[:200]!r}," if lines else how


def _end(connection: socket.socket, process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked copy of the owner must not end its parent's engine
    connection.close()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # with what it started, which may have outlived it
    process.wait()


def _watch(connection: socket.socket, interrupt: Interrupt, call: int) -> None:
    """Wait for the answer; pass the interruption on if it comes first."""
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        while not interrupt.is_set():
            if selector.select(LOOK):
                return
    wire.send(connection, {"do": "interrupt", "call": call})
