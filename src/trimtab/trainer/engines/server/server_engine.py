"""An engine over running inference servers on any machines: `vllm serve` or SGLang.

`CallResponses` makes the requests of one generate call and appends the results. A multi-turn response has one request
for each turn, with all ids so far.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimtab.errors import TrimtabError, TrimtabWarning
from trimtab.trainer.config import EngineConfig
from trimtab.trainer.engines.decoding_rows import DecodingRow, GenerateCall
from trimtab.trainer.engines.request import EngineModel, Prefixes, request_seed, validate_vllm_temperature
from trimtab.trainer.engines.server.http_client import run
from trimtab.trainer.engines.server.inference_server import InferenceServer, load_weights, wait_for_servers
from trimtab.trainer.engines.server.request_dispatch import RequestDispatch
from trimtab.trainer.engines.server.server_protocol import CompletionRequest, CompletionResult, Model, ServerProtocol
from trimtab.trainer.engines.server.sglang_protocol import SglangProtocol
from trimtab.trainer.engines.server.vllm_protocol import VllmProtocol
from trimtab.trainer.engines.turn_exchange import POLL_INTERVAL
from trimtab.trainer.engines.weight_transfer import WeightFolder, WeightManifest
from trimtab.types import AbortSignal, Completion, FloatArray, Prompt, SamplingParams, TurnHandler


class ServerEngine:
    """Samples from all servers of `config.server.urls` together (`types.Engine`).

    Each response is one request; in a multi-turn response, each turn is one request.

    Unfinished requests of a failed server move to the others. A server that returns gets the current weights and takes
    requests again. If all servers are lost, a call waits `reconnect_timeout` seconds for the first to return, then
    raises `EngineDeadError`. Only unanswered requests are sent again, from their beginning and with the same seed.

    Equal arguments and weights may give different tokens: a server's numerics depend on the other requests in its
    batch, and SGLang uses seeds only with an option. `policy_version` starts at 0.
    """

    def __init__(
        self,
        urls: Sequence[str],
        tokenizer: Any,
        config: EngineConfig,
        model_folder: Path | str,
        notify: Callable[[str], None] | None = None,
    ) -> None:
        """Waits up to `reconnect_timeout` for all servers.

        model_folder: config files of the model the servers were started with; no weights are read. notify: called with
        a line of text, from any thread, every few seconds while this engine waits for servers; default: a
        `TrimtabWarning`. The attribute may be replaced later.
        """
        self.notify = notify or (lambda line: warnings.warn(line, TrimtabWarning, stacklevel=3))
        settings = config.server
        self.policy_version = 0
        self.decoded_tokens = 0
        self.prefilled_tokens = 0
        self._settings = settings
        model = EngineModel.read(model_folder, tokenizer)
        self._manifest = WeightManifest.read(model_folder)
        protocol: ServerProtocol = VllmProtocol(settings.model) if settings.kind == "vllm" else SglangProtocol()
        self._servers = [InferenceServer(url.rstrip("/"), protocol, settings.timeout, model.vocabulary) for url in urls]
        self._folder = WeightFolder(settings.folder, getattr(torch, config.dtype))
        run(wait_for_servers(self._servers, None, settings.reconnect_timeout, self.notify, wait_for_all=True))
        self.context = self._common_model().context  # of a sequence, in tokens; None if servers do not report it
        self._model = replace(model, context=self.context)

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
        """See `types.Engine`. Raises `EngineDeadError` if all servers were lost and none came back."""
        self._check(sampling)
        version = self.policy_version
        call = GenerateCall.begin(self._model, version, prompts, samples, sampling, seed, prefixes, turns)
        dispatch = self._dispatch()
        run(CallResponses(call, dispatch).sample(abort))
        self.decoded_tokens += dispatch.decoded_tokens
        self.prefilled_tokens += dispatch.prefilled_tokens
        return call.completions()

    def prefill_logps(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[FloatArray]:
        """See `EmbeddedEngine.prefill_logps`: each response is sent as a part of a prompt.

        Prompt and response must leave room for one more token in the context. Raises what `generate` raises.
        """
        requests = [
            CompletionRequest(
                ids=(*prompt.ids.tolist(), *one.response_ids.tolist()),
                max_tokens=len(one.response_ids),
                seed=0,
                sampling=SamplingParams(ignore_stop=True),
                stop_ids=(),
                scored=len(one.response_ids),
            )
            for prompt, one in zip(prompts, completions, strict=True)
        ]
        dispatch = self._dispatch()
        results = run(dispatch.run([dispatch.ask(index, request) for index, request in enumerate(requests)], None))
        return [np.asarray(result.logp, dtype=np.float32) for result in results if result is not None]

    def update_weights(self, weights: Iterable[tuple[str, Any]], version: int, *, as_is: bool = False) -> None:  # noqa: ARG002
        """Loads named weights into every server that is alive; lost servers get the weights when they return.

        `as_is` has no effect, because weights are never quantized here. Raises `EngineDeadError` if no server is left.
        """
        folder, label = self._folder.write(self._manifest.check(weights), version)
        run(load_weights(self._servers, folder, label))
        self.policy_version = version

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Returns the weights as last published, in the servers' dtype."""
        return self._folder.read()

    def restart(self) -> None:
        """Waits up to `reconnect_timeout` for the first server that is back; it must serve the same model as before."""
        timeout = self._settings.reconnect_timeout
        run(wait_for_servers(self._servers, self._folder.current, timeout, self.notify, wait_for_all=False))

    def close(self) -> None:
        """Removes the published weights; the servers keep running, because they were started by someone else."""
        self._folder.remove()

    def _dispatch(self) -> RequestDispatch:
        return RequestDispatch(self._servers, self._folder.current, self._settings, self.notify)

    def _common_model(self) -> Model:
        first, *others = self._servers
        assert first.model is not None
        for server in others:
            if server.model is not None and server.model != first.model:
                raise TrimtabError(
                    f"{first.url} serves {first.model.name!r} (context {first.model.context}), {server.url} serves "
                    f"{server.model.name!r} (context {server.model.context}): start all servers alike"
                )
        return first.model

    def _check(self, sampling: SamplingParams) -> None:
        if self._settings.kind == "vllm":
            validate_vllm_temperature(sampling)
        if sampling.truncated:
            raise TrimtabError(
                "servers do not say which tokens were kept under top_p or top_k, so ratios would be biased: set top_p "
                '= 1 and top_k = 0, or use engine.type = "vllm"'
            )
        if sampling.top_logprobs:
            raise TrimtabError(
                "servers are not asked for their most probable ids: set top_logprobs = 0, or use engine.type = "
                '"embedded" or "vllm"'
            )


@dataclass(frozen=True, slots=True)
class CallResponses:
    """The responses of a call."""

    call: GenerateCall
    dispatch: RequestDispatch

    async def sample(self, abort: AbortSignal | None) -> None:
        """Samples all responses; responses that are not complete afterwards were aborted."""
        rows = [row for row in self.call.rows if not row.complete]
        await self.dispatch.run([self._respond(row, index) for index, row in enumerate(rows)], abort)

    async def _respond(self, row: DecodingRow, index: int) -> None:
        """Samples the rest of a response until it is complete or the call is aborted."""
        if self.call.has_ended_turn(row):
            await self._end_turn(row)
        while not row.complete:
            result = await self.dispatch.ask(index, self._request(row))
            if result is None:
                return
            if self._append(row, result):
                await self._end_turn(row)

    def _request(self, row: DecodingRow) -> CompletionRequest:
        """Returns the request that continues a response."""
        return CompletionRequest(
            ids=tuple(self.call.ids(row)),
            max_tokens=self.call.room(row),
            # A server starts every seed at its first random number, so the seed depends on the length so far.
            seed=request_seed(self.call.seed, row.prompt, row.sample, len(row.ids)),
            sampling=self.call.sampling,
            stop_ids=tuple(sorted(self.call.stop.ids)),
        )

    def _append(self, row: DecodingRow, result: CompletionResult) -> bool:
        """Appends new tokens up to the end of the response or turn; returns whether a stop ends it.

        Servers treat the tokens so far as part of the prompt and miss a stop string that begins in them, so stops are
        checked again.
        """
        begun = len(row.turn_ids)
        end = self.call.stop.end([*row.turn_ids, *result.ids], begun)
        new = len(result.ids) if end is None else end - begun
        for token, logp in zip(result.ids[:new], result.logp[:new], strict=True):
            # At temperature 0 the log-prob is 0 by definition, whatever a server reports.
            row.append(token, logp if self.call.sampling.temperature > 0 else 0.0, None, None)
        if end is not None or result.finish == "stop":
            return True
        row.complete = result.finish == "length" or self.call.room(row) <= 0
        return False

    async def _end_turn(self, row: DecodingRow) -> None:
        """Ends a turn: completes the response, or waits for the observation and appends it."""
        self.call.submit_turn(row)
        if self.call.turns is None or row.complete:
            return
        while (result := self.call.turns.result(row.prompt, row.sample, 0.0)) is None:
            if self.dispatch.aborted:
                return
            await asyncio.sleep(POLL_INTERVAL)
        row.end_turn(result, self.call.sampling.max_tokens)
        row.append_observation(truncated=False)
