"""An engine in another process: forwards calls, detects hangs, restarts the process."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from trimtab.errors import EngineDeadError, TrimtabError
from trimtab.trainer.engines.remote.hosted_turns import CallResult, EndedTurn, HandledTurn
from trimtab.trainer.engines.request import NO_WEIGHTS, Prefixes
from trimtab.types import AbortSignal, Completion, FloatArray, Problem, Prompt, SamplingParams, TurnHandler, TurnResult

POLL_INTERVAL = 0.01  # seconds between checks of the abort signal and of the results of turns
STALL_THRESHOLD = 1.0  # seconds between two polls after which this process itself must have been suspended
HANG_TIMEOUT = 300.0  # seconds without a heartbeat


class TransportLost(Exception):
    """The other side died or cannot be reached; the message is a clause that says how."""


class Transport(Protocol):
    """A connection to an `EngineHost` in another process. One call at a time is in progress."""

    turns: list[EndedTurn]  # received by `wait`, not yet taken by the caller

    @property
    def progress(self) -> int:
        """A number that grows while the other side makes progress."""
        ...

    def submit(self, call: int, method: str, *arguments: Any) -> None:
        """Starts a call of the hosted engine. Raises `TransportLost`, or `TrimtabError` if nothing was sent."""
        ...

    def wait(self, seconds: float) -> CallResult | None:
        """Returns the answer to the call if it ends within `seconds`, and otherwise None. Raises `TransportLost`."""
        ...

    def send_result(self, turn: HandledTurn) -> None: ...

    def abort(self, call: int) -> None:
        """Sets the abort signal of a call."""
        ...

    def describe(self, what: str) -> str:
        """Returns a clause for a message: a name of the other side, followed by `what`."""
        ...

    def kill(self) -> None:
        """Ends the other side at once. Idempotent."""
        ...

    def restart(self) -> None:
        """Replaces the other side, which was killed. Raises `EngineDeadError` or `TrimtabError`."""
        ...

    def close(self) -> None:
        """Lets the engine shut down, then ends the other side. Idempotent."""
        ...


class RemoteEngine:
    """An engine behind a transport (`types.Engine`). Weights must be published before anything is generated.

    With the same number of threads, tokens and log-probs equal those of the same engine in this process, bit for bit.
    Errors in the engine's specification are raised by the first call at the latest. After `hang_timeout` seconds
    without a heartbeat a call raises `EngineDeadError`. While the engine generates, a heartbeat needs a check of the
    abort signal, as before every token; otherwise it needs a running process.
    """

    def __init__(self, transport: Transport, *, hang_timeout: float = HANG_TIMEOUT) -> None:
        self.decoded_tokens = 0
        self.prefilled_tokens = 0
        self.transport, self.hang_timeout = transport, hang_timeout
        self._closed = False
        self._calls = 0
        self._begin()

    def _begin(self) -> None:
        self.policy_version = 0
        self._alive, self._has_weights = True, False
        self._before = (self.decoded_tokens, self.prefilled_tokens)

    def generate(
        self,
        prompts: Sequence[Prompt],
        samples: int,
        sampling: SamplingParams,
        *,
        seed: int,
        prefixes: Prefixes | None = None,
        turns: TurnHandler | None = None,
        abort: AbortSignal | None = None,
    ) -> list[list[Completion]]:
        """See `types.Engine`. `abort` is checked every 10 ms and takes effect at the next token.

        `turns` is called in this thread. If it raises, the call is aborted and the exception raised again; the engine
        stays usable. Raises `EngineDeadError` if the other side died or sends no heartbeat.
        """
        self._require_weights()
        limit = None if turns is None else turns.max_turn_tokens
        arguments = (_asked(prompts), samples, sampling, seed, prefixes, limit)
        return self._call("generate", *arguments, turns=turns, abort=abort)

    def prefill_logps(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[FloatArray]:
        """See `EmbeddedEngine.prefill_logps`. Raises what `generate` raises."""
        self._require_weights()
        return self._call("prefill_logps", _asked(prompts), completions)

    def update_weights(self, weights: Iterable[tuple[str, Any]], version: int, *, as_is: bool = False) -> None:
        """See `types.Engine`. Raises `EngineDeadError` as `generate` does; a new process has no weights."""
        self._call("update_weights", weights, version, as_is)
        self._has_weights = True

    def named_weights(self) -> Iterable[tuple[str, Any]]:
        """Returns copies of the weights in use."""
        return self._call("named_weights")

    def weight_checksums(self) -> Any:
        """See `EmbeddedEngine.weight_checksums`; empty for other engines."""
        return self._call("weight_checksums")

    def restart(self) -> None:
        """Starts a new process if there is none. It has no weights, and `policy_version` is 0 again.

        Raises `EngineDeadError` if the new process was lost too.
        """
        if self._closed:
            raise TrimtabError("the engine was closed: build another one")
        if not self._alive:
            self.transport.restart()
            self._begin()

    def close(self) -> None:
        """Ends the process and everything it started. A call in progress in another thread raises `EngineDeadError`."""
        if not self._closed:
            self._closed = True
            self.transport.close()

    def _require_weights(self) -> None:
        if not self._has_weights:
            raise TrimtabError(NO_WEIGHTS)

    def _call(
        self, method: str, *arguments: Any, turns: TurnHandler | None = None, abort: AbortSignal | None = None
    ) -> Any:
        if self._closed or not self._alive:
            raise EngineDeadError("the engine's process is gone: restart the engine, then publish weights")
        try:
            self._calls += 1
            self.transport.submit(self._calls, method, *arguments)
            try:
                (value, error, state), failure = self._wait(turns, abort)
            except BaseException:
                self._discard()  # a late answer must not be taken for the answer to the next call
                raise
        except TransportLost as lost:
            self._discard()
            raise EngineDeadError(f"{lost} during {method}") from None
        if self._closed:
            raise EngineDeadError(f"the engine was closed during {method}")
        self.policy_version, decoded, prefilled = state
        self.decoded_tokens, self.prefilled_tokens = self._before[0] + decoded, self._before[1] + prefilled
        if isinstance(error, EngineDeadError):
            self._discard()  # the hosted engine is dead; it is restarted in a new process
        if failure is not None:
            raise failure
        if isinstance(error, Exception):
            raise error
        if error is not None:
            raise RuntimeError(f"the engine's process failed:\n{error}")
        return value

    def _wait(self, turns: TurnHandler | None, abort: AbortSignal | None) -> tuple[CallResult, Exception | None]:
        """Waits for the end of the call; forwards turns, their results and the abort signal.

        Returns the answer, and the exception of the turn handler, if it raised one and the call was aborted. Raises
        `TransportLost` if the other side died or hangs.
        """
        waiting: list[tuple[int, int]] = []
        seen = self.transport.progress
        alive = before = time.monotonic()
        failure: Exception | None = None
        while True:
            if abort is not None and abort.is_set():
                self.transport.abort(self._calls)
                abort = turns = None
            answer = self.transport.wait(STALL_THRESHOLD / 2 if abort is None and turns is None else POLL_INTERVAL)
            if answer is not None:
                return answer, failure
            try:
                if turns is not None:
                    self._forward(turns, waiting)
            except Exception as raised:
                self.transport.abort(self._calls)
                failure, abort, turns = raised, None, None
            now = time.monotonic()
            # Time during which this process was suspended (Ctrl-Z, a frozen container) does not count.
            alive += now - before if now - before > STALL_THRESHOLD else 0
            before = now
            if (progress := self.transport.progress) != seen:
                seen, alive = progress, now
            elif now - alive > self.hang_timeout:
                what = f"gave no sign of life for {self.hang_timeout:g} s (engine.hang_timeout)"
                raise TransportLost(self.transport.describe(what))

    def _forward(self, handler: TurnHandler, waiting: list[tuple[int, int]]) -> None:
        """Submits the turns that ended and sends the results that are known; `waiting` lists turns without a result."""
        ended, self.transport.turns = self.transport.turns, []
        for call, prompt, sample, completion in ended:
            if call != self._calls:
                continue  # of an earlier call, which was aborted
            finish = handler.submit(prompt, sample, completion)
            if finish is None:
                waiting.append((prompt, sample))
            else:
                self.transport.send_result(HandledTurn(call, prompt, sample, TurnResult.end(finish)))
        for turn in list(waiting):
            if (result := handler.result(*turn, 0.0)) is not None:
                waiting.remove(turn)
                self.transport.send_result(HandledTurn(self._calls, *turn, result))

    def _discard(self) -> None:
        self._alive = False
        self.transport.kill()


def _asked(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Returns prompts without answers, which stay here, and without other fields, which may not be picklable."""
    return [Prompt(Problem(prompt.problem.id, "", ""), prompt.text, prompt.ids) for prompt in prompts]
