"""An engine over running inference servers on any machines: vLLM `serve` or SGLang."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig

from trimtab.errors import EngineDeadError, TrimtabError, TrimtabWarning
from trimtab.trainer.config import EngineConfig
from trimtab.trainer.engines.decoding_rows import Prefixes, build_rows, validate_prefixes, validate_tokens
from trimtab.trainer.engines.request import validate_request, validate_vllm_temperature
from trimtab.trainer.engines.server.call_responses import CallResponses
from trimtab.trainer.engines.server.http_client import check_url, run
from trimtab.trainer.engines.server.request_dispatch import RequestDispatch
from trimtab.trainer.engines.server.server_pool import InferenceServer, load_weights, wait_for_servers
from trimtab.trainer.engines.server.server_protocol import CompletionRequest, CompletionResult, Model, ServerProtocol
from trimtab.trainer.engines.server.sglang_protocol import SglangProtocol
from trimtab.trainer.engines.server.vllm_protocol import VllmProtocol
from trimtab.trainer.engines.server.weight_folder import WeightFolder
from trimtab.trainer.engines.stopping import StopChecker, eos_ids, generation_config
from trimtab.trainer.engines.weight_manifest import WeightManifest
from trimtab.types import AbortSignal, Completion, FloatArray, Prompt, SamplingParams, TurnHandler


class ServerEngine:
    """Samples from all servers of `config.server.urls` together (`types.Engine`).

    Each response is one request, and in a multi-turn response each turn is.

    Unfinished requests of a failed server move to the others. A server that returns gets the current weights and takes
    requests again. If all servers are lost, a call waits `reconnect_timeout` seconds for the first to return, then
    raises `EngineDeadError`. Answers are kept: only the other requests are sent again, from their beginning and with
    the same seed. This also holds for a call that is repeated after `EngineDeadError` under the same weights.

    Equal arguments and weights give equal tokens only as far as the servers' numerics allow: results depend on the
    other requests in their batches, and SGLang uses seeds only with an option. `policy_version` starts at 0.
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

        Args:
            model_folder: config files of the model the servers were started with; no weights are read.
            notify: called with a line of text, from any thread, when servers are waited for and every few seconds while
                the wait lasts; default: a `TrimtabWarning`. The attribute may be replaced later.
        """
        self.notify = notify or _warn
        settings = config.server
        self.policy_version = 0
        self.decoded_tokens = 0
        self.prefilled_tokens = 0
        self._tokenizer = tokenizer
        self._settings = settings
        model = AutoConfig.from_pretrained(model_folder, trust_remote_code=False)
        self._vocabulary: int = model.vocab_size
        self._eos = eos_ids(tokenizer, model, generation_config(model_folder))
        self._manifest = WeightManifest.read(model_folder)
        protocol: ServerProtocol = VllmProtocol(settings.model) if settings.kind == "vllm" else SglangProtocol()
        self._servers = [InferenceServer(check_url(url), protocol, settings.timeout, self._vocabulary) for url in urls]
        self._folder = WeightFolder(settings.folder, getattr(torch, config.dtype))
        # Of the last call, if it raised `EngineDeadError`, and the version of the weights that sampled them.
        self._known: tuple[int, dict[CompletionRequest, CompletionResult]] = (0, {})
        self._calls = 0
        run(wait_for_servers(self._servers, None, settings.reconnect_timeout, self.notify, wait_for_all=True))
        self._model = self._common_model()

    @property
    def context(self) -> int | None:
        """The longest sequence of the servers in tokens; None where they do not report it."""
        return self._model.context

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
        """See `types.Engine`.

        Raises:
            EngineDeadError: all servers were lost and none came back.
            TrimtabError: the arguments cannot be met; a server refuses a request or returns a token without its
                log-prob; a response was not answered after many attempts.
        """
        self._check(sampling)
        context = self._model.context
        validate_request(prompts, samples, sampling, seed, vocabulary=self._vocabulary, context=context)
        validate_prefixes(prefixes, prompts, samples, sampling)
        stop = StopChecker(self._tokenizer, self._eos, sampling)
        multi_turn = turns is not None
        validate_tokens(prefixes, prompts, stop, self._vocabulary, multi_turn=multi_turn)
        self._calls += 1
        known, self._known = self._known, (self.policy_version, {})
        responses = CallResponses(
            build_rows(len(prompts), samples, sampling, prefixes, multi_turn=multi_turn),
            prompts,
            sampling,
            seed,
            version=self.policy_version,
            stop=stop,
            stop_ids=() if sampling.ignore_stop else tuple(sorted({*self._eos, *sampling.stop_ids})),
            turns=turns,
            name=f"{self._folder.token}-{self._calls}",
        )
        dispatch = RequestDispatch(
            self._servers,
            self._folder.current,
            self._settings,
            self.notify,
            known=known[1] if known[0] == self.policy_version else {},
        )
        try:
            run(responses.sample(dispatch, abort))
        except EngineDeadError:
            whole = {request: result for request, result in dispatch.results.items() if result.finish != "abort"}
            self._known = (self.policy_version, whole)
            raise
        self.decoded_tokens += sum(len(result.ids) for result in dispatch.results.values())
        self.prefilled_tokens += sum(len(request.ids) for request in dispatch.results)
        completions = responses.completions()
        return [completions[p * samples : (p + 1) * samples] for p in range(len(prompts))]

    def prefill_logps(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[FloatArray]:
        """See `EmbeddedEngine.prefill_logps`: each response is sent as a part of a prompt.

        Prompt and response must leave room for one more token in the context.

        Raises:
            EngineDeadError: all servers were lost and none came back.
            TrimtabError: a server refuses, or returns no log-probs of prompts.
        """
        self._calls += 1
        requests = [
            CompletionRequest(
                name=f"{self._folder.token}-{self._calls}-{index}",
                ids=(*prompt.ids.tolist(), *one.response_ids.tolist()),
                max_tokens=len(one.response_ids),
                seed=0,
                sampling=SamplingParams(ignore_stop=True),
                stop_ids=(),
                scored=len(one.response_ids),
            )
            for index, (prompt, one) in enumerate(zip(prompts, completions, strict=True))
        ]
        dispatch = RequestDispatch(self._servers, self._folder.current, self._settings, self.notify, known={})
        run(dispatch.run([dispatch.ask(index, request) for index, request in enumerate(requests)], None))
        return [np.asarray(dispatch.results[request].logp, dtype=np.float32) for request in requests]

    def update_weights(self, weights: Iterable[tuple[str, Any]], version: int, *, as_is: bool = False) -> None:  # noqa: ARG002
        """Loads named weights into every server that is alive; others get them when they are back.

        `as_is` has no effect, because weights are never quantized here.

        Raises:
            EngineDeadError: no server is left.
            TrimtabError: the weights do not fit the model, or a server does not load them.
        """
        tensors = self._manifest.check(weights)
        folder, label = self._folder.write(tensors, version)
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

    def _common_model(self) -> Model:
        first = self._servers[0]
        assert first.model is not None
        for server in self._servers[1:]:
            assert server.model is not None
            if server.model != first.model:
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


def _warn(line: str) -> None:
    warnings.warn(line, TrimtabWarning, stacklevel=3)
