"""Runs vLLM's engine in this process or in its own; both take requests and stream tokens.

Tokens arrive in pieces (`TokenDelta`), so that an interrupted call keeps what there is and a stop string ends its
response at the token that completes it. Deciding that is the caller's: `OnTokens` answers whether the response is
complete.
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

POLL = 0.02  # seconds between looks at an interrupt
ALIVE = 1.0  # seconds between looks at vLLM's processes


@dataclass(frozen=True, slots=True)
class Request:
    ids: list[int]
    params: Any  # vllm.SamplingParams


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """New tokens of one response. `logp[i]` is None where vLLM gave none; `reason` says why it ended, if it has."""

    ids: Sequence[int]
    logp: Sequence[float | None]
    kept: Sequence[Sequence[int]] | None
    cached: int  # prompt tokens that came from the prefix cache
    reason: str | None


OnTokens = Callable[[int, TokenDelta], bool]  # (index of the request, its new tokens) -> the response is complete


class Core(Protocol):
    def run(self, requests: Sequence[Request], take: OnTokens, interrupt: AbortSignal | None) -> None:
        """Until every request is complete or `interrupt` is set; nothing is left running afterwards."""
        ...

    def load(self, weights: SharedWeights) -> list[str]:
        """Take them over and forget every cached prefix; the names of vLLM's parameters that took nothing."""
        ...

    def recover(self) -> bool:
        """Start again if it is dead; whether it was (and has no weights now)."""
        ...

    def close(self) -> None: ...


class SharedCore:
    """vLLM's engine stepped by hand in this process: repeatable, and interrupted between any two tokens."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        # Read by vLLM when the engine is made; its child process would otherwise be the default.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm.engine.arg_utils import EngineArgs  # pyright: ignore[reportMissingImports]
        from vllm.v1.engine.llm_engine import LLMEngine  # pyright: ignore[reportMissingImports]

        self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        self._count = 0

    def run(self, requests: Sequence[Request], take: OnTokens, interrupt: AbortSignal | None) -> None:
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
                    done = take(index, chunk(output))
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
        left = self._engine.collective_rpc("load_published", args=(_path(weights), weights.entries))
        if not self._engine.reset_prefix_cache():
            raise TrimtabError("vLLM did not reset its prefix cache: requests are still running")
        return [name for names in left for name in names]

    def recover(self) -> bool:
        return False

    def close(self) -> None:
        self._engine.engine_core.shutdown()


class OwnCore:
    """vLLM's AsyncLLM: the model runs in a process of its own, this one only waits."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._arguments = arguments
        self._count = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="vllm", daemon=True)
        self._thread.start()
        self._llm: Any = None
        self._llm = self._call(self._start())

    def _run_loop(self) -> None:
        # vLLM's processes are started in this thread and inherit its mask. A terminal sends Ctrl-C to all of them, and
        # the step in progress still needs them; `close` ends them. Starting Python's resource tracker clears the mask.
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
                return future.result(timeout=ALIVE)
            except VllmDeadError as error:
                raise EngineDeadError(f"vLLM's process died ({error}); its own output says why") from error
            except TimeoutError:
                # vLLM answers no more requests after SIGTERM, which ends its process in good order.
                if ended := self._ended():
                    future.cancel()
                    raise EngineDeadError(f"vLLM's process died ({ended}); its own output says why") from None

    def _ended(self) -> str:
        """Which of vLLM's processes ended, with their exit codes; empty while all run, and before they are started."""
        if self._llm is None:
            return ""
        codes = self._llm.engine_core.resources.engine_manager.finished_procs()
        return ", ".join(f"{name}: exit code {code}" for name, code in codes.items())

    def run(self, requests: Sequence[Request], take: OnTokens, interrupt: AbortSignal | None) -> None:
        self._call(self._run(requests, take, interrupt))

    async def _run(self, requests: Sequence[Request], take: OnTokens, interrupt: AbortSignal | None) -> None:
        tasks = [asyncio.ensure_future(self._one(index, request, take)) for index, request in enumerate(requests)]
        waiting: set[asyncio.Future[None]] = set(tasks)
        try:
            while waiting and not (interrupt is not None and interrupt.is_set()):
                timeout = None if interrupt is None else POLL
                done, waiting = await asyncio.wait(waiting, timeout=timeout, return_when=asyncio.FIRST_EXCEPTION)
                for task in done:
                    task.result()
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def _one(self, index: int, request: Request, take: OnTokens) -> None:
        self._count += 1
        outputs = self._llm.generate({"prompt_token_ids": request.ids}, request.params, str(self._count))
        try:
            async for output in outputs:
                if take(index, chunk(output)):
                    return
        finally:
            # Tells the engine to drop the request, if it has not finished.
            await outputs.aclose()

    def load(self, weights: SharedWeights) -> list[str]:
        return self._call(self._load(weights))

    async def _load(self, weights: SharedWeights) -> list[str]:
        left = await self._llm.collective_rpc("load_published", args=(_path(weights), weights.entries))
        if not await self._llm.reset_prefix_cache():
            raise TrimtabError("vLLM did not reset its prefix cache: requests are still running")
        return [name for names in left for name in names]

    def recover(self) -> bool:
        if not self._llm.errored and not self._ended():
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
        self._llm = None  # now: at the interpreter's end its destructor would find nothing it needs
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)


def chunk(output: Any) -> TokenDelta:
    """A `RequestOutput` of one sample, asked for in deltas."""
    [new] = output.outputs
    logp: list[float | None] = [None] * len(new.token_ids)
    for place, entry in enumerate(new.logprobs or ()):
        found = entry.get(new.token_ids[place])
        logp[place] = None if found is None else found.logprob
    mask = getattr(new, "sampling_mask", None)
    return TokenDelta(
        ids=new.token_ids,
        logp=logp,
        kept=None if mask is None else mask.token_ids,
        cached=output.num_cached_tokens or 0,
        reason=new.finish_reason,
    )


def _path(weights: SharedWeights) -> str:
    """A name under which other processes of this machine can open a file that has none."""
    return f"/proc/{os.getpid()}/fd/{weights.descriptor}"
