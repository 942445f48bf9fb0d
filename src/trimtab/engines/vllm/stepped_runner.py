"""Runs vLLM's engine in this process or in a process of its own; both take requests and stream tokens.

New tokens arrive as `TokenDelta`, so that an aborted call keeps the tokens sampled so far and a stop string ends its
response at the token that completes it. The caller's `OnTokens` decides whether a response is complete.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from typing import Any, Protocol

from trimtab.engines.remote.shared_weights import SharedWeights
from trimtab.errors import EngineDeadError, TrimtabError
from trimtab.types import AbortSignal

POLL_INTERVAL = 0.02  # seconds between checks of the abort signal
LIVENESS_INTERVAL = 1.0  # seconds between checks of vLLM's processes


@dataclass(frozen=True, slots=True)
class Request:
    ids: list[int]
    params: Any  # vllm.SamplingParams


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """New tokens of one response. `logp[i]` is None where vLLM returned none; `reason` is its finish reason, if any."""

    ids: Sequence[int]
    logp: Sequence[float | None]
    kept: Sequence[Sequence[int]] | None
    cached: int  # prompt tokens that came from the prefix cache
    reason: str | None


OnTokens = Callable[[int, TokenDelta], bool]  # (index of the request, its new tokens) -> is the response complete?


class Core(Protocol):
    def run(self, requests: Sequence[Request], on_tokens: OnTokens, interrupt: AbortSignal | None) -> None:
        """Runs until every request is complete or `interrupt` is set; then no request is running any more."""
        ...

    def load(self, weights: SharedWeights) -> list[str]:
        """Loads weights and resets the prefix cache; returns the names of vLLM's parameters that were not loaded."""
        ...

    def recover(self) -> bool:
        """Restarts the engine if it is dead; returns whether it was (it then has no weights)."""
        ...

    def close(self) -> None: ...


class SharedCore:
    """Steps vLLM's engine in this process: repeatable, and can be aborted between any two tokens."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        # Read by vLLM when the engine is built; the default is a child process.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm.engine.arg_utils import EngineArgs  # pyright: ignore[reportMissingImports]
        from vllm.v1.engine.llm_engine import LLMEngine  # pyright: ignore[reportMissingImports]

        self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        self._count = 0

    def run(self, requests: Sequence[Request], on_tokens: OnTokens, interrupt: AbortSignal | None) -> None:
        running: dict[str, int] = {}
        try:
            for index, request in enumerate(requests):
                self._count += 1
                running[str(self._count)] = index
                self._engine.add_request(str(self._count), {"prompt_token_ids": request.ids}, request.params)
            while running and not (interrupt is not None and interrupt.is_set()):
                complete = []
                for output in self._engine.step():
                    index = running.get(output.request_id)
                    if index is None:
                        continue
                    done = on_tokens(index, to_delta(output))
                    if done and not output.finished:
                        complete.append(output.request_id)
                    if done or output.finished:
                        del running[output.request_id]
                if complete:
                    self._engine.abort_request(complete)
        finally:
            if running:
                self._engine.abort_request(list(running))

    def load(self, weights: SharedWeights) -> list[str]:
        missing = self._engine.collective_rpc("load_published", args=(_path(weights), weights.entries))
        if not self._engine.reset_prefix_cache():
            raise TrimtabError("vLLM did not reset its prefix cache: requests are still running")
        return [name for names in missing for name in names]

    def recover(self) -> bool:
        return False

    def close(self) -> None:
        self._engine.engine_core.shutdown()


class OwnCore:
    """Runs vLLM's AsyncLLM, whose model is in a process of its own."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._arguments = arguments
        self._count = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="vllm", daemon=True)
        self._thread.start()
        self._llm: Any = None
        self._llm = self._call(self._start())

    def _run_loop(self) -> None:
        # vLLM's processes are started in this thread and inherit its signal mask. A terminal sends Ctrl-C to all of
        # them, but the step in progress still needs them; `close` ends them. The resource tracker is started first,
        # because starting it clears the mask.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        self._loop.run_forever()

    async def _start(self) -> Any:
        from vllm.engine.arg_utils import AsyncEngineArgs  # pyright: ignore[reportMissingImports]
        from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]

        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**self._arguments))
        await llm.collective_rpc("end_with", args=(os.getpid(),))
        return llm

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        from vllm.v1.engine.exceptions import EngineDeadError as VllmDeadError  # pyright: ignore[reportMissingImports]

        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        while True:
            try:
                return future.result(timeout=LIVENESS_INTERVAL)
            except VllmDeadError as error:
                raise EngineDeadError(f"vLLM's process died ({error}); its own output says why") from error
            except TimeoutError:
                # After SIGTERM vLLM exits normally and answers no more requests, so that the future never completes.
                if ended := self._ended_processes():
                    future.cancel()
                    raise EngineDeadError(f"vLLM's process died ({ended}); its own output says why") from None

    def _ended_processes(self) -> str:
        """Returns which of vLLM's processes have ended, with exit codes; empty while all run or before they start."""
        if self._llm is None:
            return ""
        codes = self._llm.engine_core.resources.engine_manager.finished_procs()
        return ", ".join(f"{name}: exit code {code}" for name, code in codes.items())

    def run(self, requests: Sequence[Request], on_tokens: OnTokens, interrupt: AbortSignal | None) -> None:
        self._call(self._run(requests, on_tokens, interrupt))

    async def _run(self, requests: Sequence[Request], on_tokens: OnTokens, interrupt: AbortSignal | None) -> None:
        tasks = [
            asyncio.ensure_future(self._run_one(index, request, on_tokens)) for index, request in enumerate(requests)
        ]
        pending: set[asyncio.Future[None]] = set(tasks)
        try:
            while pending and not (interrupt is not None and interrupt.is_set()):
                timeout = None if interrupt is None else POLL_INTERVAL
                done, pending = await asyncio.wait(pending, timeout=timeout, return_when=asyncio.FIRST_EXCEPTION)
                for task in done:
                    task.result()
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    async def _run_one(self, index: int, request: Request, on_tokens: OnTokens) -> None:
        self._count += 1
        outputs = self._llm.generate({"prompt_token_ids": request.ids}, request.params, str(self._count))
        try:
            async for output in outputs:
                if on_tokens(index, to_delta(output)):
                    return
        finally:
            # Aborts the request in the engine if it has not finished.
            await outputs.aclose()

    def load(self, weights: SharedWeights) -> list[str]:
        return self._call(self._load(weights))

    async def _load(self, weights: SharedWeights) -> list[str]:
        missing = await self._llm.collective_rpc("load_published", args=(_path(weights), weights.entries))
        if not await self._llm.reset_prefix_cache():
            raise TrimtabError("vLLM did not reset its prefix cache: requests are still running")
        return [name for names in missing for name in names]

    def recover(self) -> bool:
        if not self._llm.errored and not self._ended_processes():
            return False
        self._llm.shutdown()
        self._llm = None
        self._llm = self._call(self._start())
        return True

    def close(self) -> None:
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _stop(self) -> None:
        self._llm.shutdown()
        self._llm = None  # now: at interpreter exit its destructor would fail
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)


def to_delta(output: Any) -> TokenDelta:
    """Converts a vLLM `RequestOutput` of one sample with `RequestOutputKind.DELTA`."""
    [new] = output.outputs
    logp: list[float | None] = [None] * len(new.token_ids)
    for i, entry in enumerate(new.logprobs or ()):
        value = entry.get(new.token_ids[i])
        logp[i] = None if value is None else value.logprob
    mask = getattr(new, "sampling_mask", None)
    return TokenDelta(
        ids=new.token_ids,
        logp=logp,
        kept=None if mask is None else mask.token_ids,
        cached=output.num_cached_tokens or 0,
        reason=new.finish_reason,
    )


def _path(weights: SharedWeights) -> str:
    """Returns a path under which other processes of this machine can open the unnamed file."""
    return f"/proc/{os.getpid()}/fd/{weights.descriptor}"
