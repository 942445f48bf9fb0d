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
POLL_INTERVAL = 0.01  # seconds between checks of the abort signal
STALL_THRESHOLD = 1.0  # seconds: polls further apart mean that this process itself was suspended
SHUTDOWN_TIMEOUT = 10.0  # seconds for the process to exit
OUTPUT_TAIL_BYTES = 4096  # of its output that are searched for the last line
HANG_TIMEOUT = 300.0  # seconds
# Set by torchrun and removed from the child's environment: the child is no rank. torch.distributed started in it (by
# vLLM) would otherwise join the trainer's ranks and wait for their store.
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "ROLE_NAME")
TORCHRUN_VARIABLES += ("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE")
TORCHRUN_PREFIX = "TORCHELASTIC_"
_ERRORS: dict[str, type[TrimtabError]] = {
    kind.__name__: kind for kind in (TrimtabError, DivergedError, EngineDeadError)
}


class ProcessEngine:
    """Runs the engine that `spec` describes (`engine_spec.build`) in a child process (`types.Engine`).

    The process starts at once and loads while the caller continues; errors in `spec` are raised by the first call.
    Weights must be published before anything is generated. With the same number of threads, tokens and log-probs equal
    those of the same engine in this process, bit for bit. Output of the process is not shown on the terminal; its last
    line is quoted when the process dies.

    Args:
        spec: JSON; see `engine_spec.py`.
        threads: processor threads the engine may use.
        devices: CUDA_VISIBLE_DEVICES of the process; None: that of this process.
        patience: seconds without a heartbeat after which a call raises `EngineDeadError`. While the engine generates,
            heartbeats need new tokens; otherwise they need a running process.
    """

    def __init__(
        self,
        spec: Mapping[str, Any],
        *,
        threads: int,
        devices: str | None = None,
        patience: float = HANG_TIMEOUT,
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
        self._child: WorkerProcess | None = None
        self._closed = False
        self.recover()

    @property
    def pid(self) -> int | None:
        """The process id of the child; None while there is no child."""
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
        """See `types.Engine`. `interrupt` is checked every 10 ms and takes effect at the next token.

        Raises:
            EngineDeadError: the process died or sends no heartbeat.
            TrimtabError: what the hosted engine refuses; no weights were published yet.
        """
        check_prefixes(prefixes, prompts, samples, sampling)
        if not self._has_weights:
            raise TrimtabError("the engine's process holds no weights yet: publish before generating")
        names, arrays = wire.pack_prompts(prompts)
        packed_prefixes = None
        if prefixes is not None:
            packed_prefixes, more = wire.pack_completions(prefixes)
            arrays |= more
        head = {
            "samples": samples,
            "sampling": wire.pack_sampling(sampling),
            "seed": seed,
            "prompts": names,
            "prefixes": packed_prefixes,
        }
        frame = self._call("generate", head, arrays, interrupt=interrupt)
        return wire.unpack_completions(frame.head["groups"], frame.arrays)

    def publish(self, weights: Iterable[tuple[str, Any]], version: int, *, exact: bool = False) -> None:
        """See `types.Engine`. `SharedWeights` are passed on directly; other weights are copied to a shared file first.

        Raises:
            EngineDeadError: the process died or sends no heartbeat; a new process has no weights.
            TrimtabError: what the hosted engine refuses; there is not enough memory for the copy.
        """
        with contextlib.ExitStack() as cleanup:  # a caught error must not keep a copy of the model open
            if isinstance(weights, SharedWeights):
                shared = weights
            else:
                shared = cleanup.enter_context(contextlib.closing(share(weights)))
            head = {"version": version, "exact": exact, "entries": shared.entries}
            self._call("publish", head, files=[shared.descriptor])
        self._has_weights = True

    def weights(self) -> list[tuple[str, Any]]:
        """Returns copies of the weights in use."""
        frame = self._call("weights", {})
        shared = SharedWeights(frame.files[0], frame.head["entries"])
        try:
            return list(shared)
        finally:
            shared.close()

    def recover(self) -> None:
        """Starts a new process if there is none; it has no weights, and `policy_version` is 0 again.

        Raises:
            TrimtabError: the engine was closed.
        """
        if self._closed:
            raise TrimtabError("the engine was closed: build another one")
        if self._child is None:
            self._child = WorkerProcess(self._spec, self._environment)
            self._has_weights = False
            self._before = (self.decoded, self.prefilled)
            self.policy_version = 0

    def close(self) -> None:
        """Ends the process and everything it started. A call in progress in another thread raises `EngineDeadError`."""
        self._closed = True
        child, self._child = self._child, None
        if child is not None:
            child.close()

    def _call(
        self,
        action: str,
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
            wire.send(child.connection, {"do": action, "call": call, **head}, arrays, files)
            frame = child.wait_for_answer(interrupt, call)
        except TimeoutError:
            self._lose(child, action, silent=True)
        except OSError:
            self._lose(child, action)
        except BaseException:
            # The answer of this call is still pending and must not be taken for the next call's.
            self._child = None
            child.end()
            raise
        if self._closed:
            raise EngineDeadError(f"the engine was closed during {action}")
        self._update_state(frame.head)
        return frame

    def _update_state(self, head: Mapping[str, Any]) -> None:
        if "state" in head:
            self.policy_version, decoded, prefilled = head["state"]
            self.decoded, self.prefilled = self._before[0] + decoded, self._before[1] + prefilled
        if "error" not in head:
            return
        kind, text = head["error"]["type"], head["error"]["text"]
        if kind == EngineDeadError.__name__ and self._child is not None:
            # The hosted engine is dead; it can only be restarted in a new process.
            child, self._child = self._child, None
            child.close()
        if kind in _ERRORS:
            raise _ERRORS[kind](text)
        raise RuntimeError(f"the engine's process failed:\n{text}")

    def _lose(self, child: WorkerProcess, action: str, *, silent: bool = False) -> NoReturn:
        self._child = None
        child.end()
        how = f"gave no sign of life for {self.patience:g} s (engine.hang_timeout)" if silent else child.exit_reason()
        raise EngineDeadError(f"the engine's process {how}{child.last_output()} during {action}")


class WorkerProcess:
    """The process, this end of its connection, and its output (in a deleted file)."""

    def __init__(self, spec: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        self.connection, child_end = socket.socketpair()
        with tempfile.TemporaryFile() as log:
            self._log = os.dup(log.fileno())
        weakref.finalize(self, os.close, self._log)
        with child_end:
            self.process = subprocess.Popen(
                # -P: a module in the working directory must not shadow an installed one.
                [sys.executable, "-P", "-m", WORKER, str(child_end.fileno()), str(os.getpid())],
                pass_fds=[child_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=environment,
                start_new_session=True,  # Ctrl-C must reach the trainer only
            )
        self.end = weakref.finalize(self, _end, self.connection, self.process, os.getpid())
        with contextlib.suppress(OSError):  # it has died already: the first call reports that
            wire.send(self.connection, spec)

    def wait_for_answer(self, interrupt: AbortSignal | None, call: int) -> wire.Frame:
        """Returns the answer to a request; forwards the abort signal to the process while it waits.

        Raises:
            TimeoutError: no heartbeat arrived within the timeout of the connection.
        """
        while True:
            if self.wait_for_message(interrupt):
                frame = wire.receive(self.connection)
                if "alive" not in frame.head:
                    return frame
            else:
                wire.send(self.connection, {"do": "interrupt", "call": call})
                interrupt = None

    def wait_for_message(self, interrupt: AbortSignal | None) -> bool:
        """Waits for a frame or the abort signal; returns whether the frame came first."""
        timeout = self.connection.gettimeout()
        assert timeout is not None
        before = time.monotonic()
        deadline = before + timeout
        with selectors.DefaultSelector() as selector:
            try:
                selector.register(self.connection, selectors.EVENT_READ)
            except ValueError:
                raise ConnectionError("closed by another thread") from None
            while interrupt is None or not interrupt.is_set():
                if selector.select(STALL_THRESHOLD / 2 if interrupt is None else POLL_INTERVAL):
                    return True
                if self.connection.fileno() < 0:
                    raise ConnectionError("closed by another thread")
                now = time.monotonic()
                # Time during which this process was suspended (Ctrl-Z, a frozen container) does not count.
                deadline += now - before if now - before > STALL_THRESHOLD else 0
                before = now
                if now > deadline:
                    raise TimeoutError
        return False

    def close(self) -> None:
        """Lets the engine close within `SHUTDOWN_TIMEOUT`, then kills the process."""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self.connection.shutdown(socket.SHUT_WR)
            self.process.wait(SHUTDOWN_TIMEOUT)
        self.end()

    def exit_reason(self) -> str:
        """Returns how the process ended, as a clause for messages."""
        code = self.process.wait()
        if code == -signal.SIGKILL:
            return "was killed (by hand, or because memory ran out)"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def last_output(self) -> str:
        """Returns the last line of the process's output, as a clause for messages; empty if there is none."""
        size = os.fstat(self._log).st_size
        tail = os.pread(self._log, OUTPUT_TAIL_BYTES, max(0, size - OUTPUT_TAIL_BYTES)).decode(errors="replace")
        lines = tail.strip().splitlines()
        return f", last saying {lines[-1].strip()[:200]!r}," if lines else ""


def _environment() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name not in TORCHRUN_VARIABLES and not name.startswith(TORCHRUN_PREFIX)
    }


def _end(connection: socket.socket, process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked copy of this process must not end its parent's engine
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # including processes that it started, which may still run
    connection.close()  # only now: a thread that waits for an answer is woken by the closed other end
    process.wait()
