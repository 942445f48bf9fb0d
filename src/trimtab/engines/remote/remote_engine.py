"""An engine in another process: forwards calls, detects hangs, restarts."""

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
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from trimtab.engines.embedded.decoding_rows import Prefixes, check_prefixes
from trimtab.engines.remote import wire
from trimtab.engines.remote.shared_weights import SharedWeights, share
from trimtab.errors import DivergedError, EngineDeadError, TrimtabError
from trimtab.types import AbortSignal, Completion, Prompt, Sampling

WORKER = "trimtab.engines.remote.engine_host"
LOOK = 0.01  # seconds between looks at an interrupt
PAUSE = 1.0  # seconds: two looks further apart mean that this process stood still
GRACE = 10.0  # seconds for the process to end in good order
LAST_WORDS = 4096  # bytes of what it printed that are searched for its last line
PATIENCE = 300.0  # seconds
# What torchrun says about this process. The child is no rank: torch.distributed started in it (by vLLM) would
# look for a place among the trainer's ranks, and wait for a store that is none of its own.
LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "ROLE_NAME")
LAUNCHER += ("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE")
ELASTIC = "TORCHELASTIC_"
_ERRORS: dict[str, type[TrimtabError]] = {
    kind.__name__: kind for kind in (TrimtabError, DivergedError, EngineDeadError)
}


class ProcessEngine:
    """The engine that `spec` describes (`engine_spec.build`), in a child process (`types.Engine`).

    The process starts at once and loads while the caller goes on; mistakes in `spec` are raised by the first call.
    Weights must be published before anything is generated. With as many threads, tokens and log-probs have the bits of
    the same engine in this process. What the process prints is kept out of the terminal; its last line is quoted when
    it dies.

    Args:
        spec: JSON; see `engine_spec.py`.
        threads: processor threads the engine may use.
        devices: CUDA_VISIBLE_DEVICES of the process; None: those of this one.
        patience: seconds without a sign of life after which a call gives the process up (`EngineDeadError`). While it
            generates, the signs are tokens; otherwise, that it runs at all.
    """

    def __init__(
        self,
        spec: Mapping[str, Any],
        *,
        threads: int,
        devices: str | None = None,
        patience: float = PATIENCE,
    ) -> None:
        self.policy_version = 0
        self.decoded = 0
        self.prefilled = 0
        self._spec = {**spec, "threads": threads}
        self.patience = patience
        self._environment = {**_environment(), "OMP_NUM_THREADS": str(threads)}
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
        interrupt: AbortSignal | None = None,
    ) -> list[list[Completion]]:
        """See `types.Engine`. `interrupt` is looked at every 10 ms and takes effect at the next token.

        Raises:
            EngineDeadError: the process died, or gives no sign of life.
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
            EngineDeadError: the process died or gives no sign of life; whether it had taken the weights does not
            matter, a
                new one has none.
            TrimtabError: what the hosted engine refuses; there is no memory for the handover.
        """
        with contextlib.ExitStack() as own:  # a caught error must not keep a copy of the model open
            if isinstance(weights, SharedWeights):
                shared = weights
            else:
                shared = own.enter_context(contextlib.closing(share(weights)))
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
        """End the process and all it started. Another thread's call in progress raises `EngineDeadError`."""
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
        interrupt: AbortSignal | None = None,
    ) -> wire.Frame:
        child, call = self._child, next(self._calls)
        if child is None:
            raise EngineDeadError("the engine's process is gone: recover the engine, then publish weights")
        child.connection.settimeout(self.patience)
        try:
            wire.send(child.connection, {"do": doing, "call": call, **head}, arrays, files)
            frame = child.answer(interrupt, call)
        except TimeoutError:
            self._lose(child, doing, silent=True)
        except OSError:
            self._lose(child, doing)
        except BaseException:
            # Whatever stopped this call, its answer must not be taken for the next one's.
            self._child = None
            child.end()
            raise
        if self._closed:
            raise EngineDeadError(f"the engine was closed during {doing}")
        self._note(frame.head)
        return frame

    def _note(self, head: Mapping[str, Any]) -> None:
        if "state" in head:
            self.policy_version, decoded, prefilled = head["state"]
            self.decoded, self.prefilled = self._before[0] + decoded, self._before[1] + prefilled
        if "error" not in head:
            return
        kind, text = head["error"]["type"], head["error"]["text"]
        if kind == EngineDeadError.__name__ and self._child is not None:
            # What it hosted is dead; a new process is the way back.
            child, self._child = self._child, None
            child.close()
        if kind in _ERRORS:
            raise _ERRORS[kind](text)
        raise RuntimeError(f"the engine's process failed:\n{text}")

    def _lose(self, child: _Child, doing: str, *, silent: bool = False) -> NoReturn:
        self._child = None
        child.end()
        how = f"gave no sign of life for {self.patience:g} s (engine.patience)" if silent else child.fate()
        raise EngineDeadError(f"the engine's process {how}{child.last_words()} during {doing}")


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
                [sys.executable, "-P", "-m", WORKER, str(theirs.fileno()), str(os.getpid())],
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

    def answer(self, interrupt: AbortSignal | None, call: int) -> wire.Frame:
        """The answer to a request, to which an interruption is passed on.

        `TimeoutError` when there was no sign of life for as long as the connection waits.
        """
        while True:
            if self._answered(interrupt):
                frame = wire.receive(self.connection)
                if "alive" not in frame.head:
                    return frame
            else:
                wire.send(self.connection, {"do": "interrupt", "call": call})
                interrupt = None

    def _answered(self, interrupt: AbortSignal | None) -> bool:
        """Wait for a frame or the interruption; whether the frame came first."""
        patience = self.connection.gettimeout()
        assert patience is not None
        before = time.monotonic()
        end = before + patience
        with selectors.DefaultSelector() as selector:
            try:
                selector.register(self.connection, selectors.EVENT_READ)
            except ValueError:
                raise ConnectionError("closed by another thread") from None
            while interrupt is None or not interrupt.is_set():
                if selector.select(PAUSE / 2 if interrupt is None else LOOK):
                    return True
                if self.connection.fileno() < 0:
                    raise ConnectionError("closed by another thread")
                now = time.monotonic()
                # A trainer that was stopped itself (Ctrl-Z, a frozen container) did not wait meanwhile.
                end += now - before if now - before > PAUSE else 0
                before = now
                if now > end:
                    raise TimeoutError
        return False

    def close(self) -> None:
        """Let the engine end in good order, but not for long."""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self.connection.shutdown(socket.SHUT_WR)
            self.process.wait(GRACE)
        self.end()

    def fate(self) -> str:
        """How it ended."""
        code = self.process.wait()
        if code == -signal.SIGKILL:
            return "was killed (by hand, or because memory ran out)"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def last_words(self) -> str:
        """The last line it printed, as the end of a clause; empty if there is none."""
        size = os.fstat(self._log).st_size
        words = os.pread(self._log, LAST_WORDS, max(0, size - LAST_WORDS)).decode(errors="replace")
        lines = words.strip().splitlines()
        return f", last saying {lines[-1].strip()[:200]!r}," if lines else ""


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in LAUNCHER and not name.startswith(ELASTIC)}


def _end(connection: socket.socket, process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked copy of the owner must not end its parent's engine
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # with what it started, which may have outlived it
    connection.close()  # only now: who waits for an answer is woken by the other end
    process.wait()
