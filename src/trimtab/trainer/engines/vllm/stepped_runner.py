"""Starts vLLM without weights, tokenizer or chat defaults, and steps its engine by hand: requests in, new tokens out.

New tokens arrive as `TokenDelta`, so that an aborted call keeps the tokens sampled so far and a stop string ends its
response at the token that completes it. The caller's `OnTokens` decides whether a response is complete.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch._dynamo

from trimtab.errors import EngineDeadError, TrimtabError
from trimtab.plugins import require_extra
from trimtab.trainer.config import EngineConfig
from trimtab.trainer.engines.weight_transfer import SharedWeights
from trimtab.types import AbortSignal

GIB = 1 << 30
MAX_LOGPROBS = 1024  # that a request may ask for at each token; also the limit of `sampling.top_logprobs`
# Block size of the KV cache on a CPU, in tokens. vLLM's default of 128 is longer than most prompts of the recipes, and
# the samples of a prompt share whole blocks only.
CPU_BLOCK = 32
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # vLLM's default would bind the trainer's threads to the same cores.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}


def import_vllm(*, eager: bool) -> None:
    """Imports vLLM with the environment it needs. Raises `TrimtabError` if it is missing or broken."""
    require_extra("vllm", 'engine.type = "vllm"', "on a CPU `make vllm-cpu` (a separate environment)")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if eager:
        # vLLM would still compile the ranking of log-probs, which is not used here: a minute on a busy CPU.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        torch._dynamo.config.disable = True
    try:
        import vllm.sampling_params  # noqa: F401  # pyright: ignore[reportMissingImports]
        from vllm.v1.engine import llm_engine  # noqa: F401  # pyright: ignore[reportMissingImports]
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        message = " ".join(str(error).split())
        raise TrimtabError(f"vLLM is installed but broken ({message}); `trimtab doctor` says what to mend") from error


def arguments(folder: Path | str, config: EngineConfig) -> dict[str, Any]:
    """Returns vLLM's engine arguments. The engine starts with dummy weights, to be replaced before it samples."""
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    settings = config.vllm
    options: dict[str, Any] = {
        "model": str(folder),
        "dtype": config.dtype,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": MAX_LOGPROBS,
        "enable_prefix_caching": True,
        "enforce_eager": settings.eager,
        "max_model_len": settings.context,
        "tensor_parallel_size": settings.tensor_parallel,
        # In a Ray actor vLLM would request a bundle per GPU of the placement group; this process already has its GPUs.
        "distributed_executor_backend": "mp" if settings.tensor_parallel > 1 else None,
        "quantization": settings.quantization,
        "kv_cache_dtype": settings.kv_cache_dtype,
        "worker_extension_cls": "trimtab.trainer.engines.vllm.worker_extension.WeightLoading",
        "disable_log_stats": True,
        "trust_remote_code": False,
    }
    if settings.sampling_mask and current_platform.is_cpu():
        raise TrimtabError(
            "engine.vllm.sampling_mask needs a GPU: vLLM cannot return the sets on a CPU; set top_p = 1 and top_k = 0"
        )
    if settings.sampling_mask:
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")  # the first version returns no sampling masks
        options["return_sampling_mask"] = True
    if current_platform.is_cpu():
        options |= {
            "kv_cache_memory_bytes": int(settings.memory * GIB),
            "block_size": CPU_BLOCK,
            # Chunked prefill draws a random number after each chunk and resets the generator, which fails on a CPU.
            "enable_chunked_prefill": False,
        }
    else:
        options["gpu_memory_utilization"] = settings.memory
    return options


@dataclass(frozen=True, slots=True)
class TokenRequest:
    index: int  # of the response; each turn of a response is a request
    ids: list[int]
    params: Any  # vllm.SamplingParams


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """New tokens of one response."""

    ids: Sequence[int]
    kept: Sequence[Sequence[int]] | None  # sampling mask of each token, if vLLM returns masks
    logps: Sequence[Mapping[int, float]]  # for each token: id -> log-prob, of the most probable ids and the sampled id
    cached: int  # prompt tokens that came from the prefix cache
    prompt: Sequence[float]  # log-probs of all prompt tokens but the first, if they were asked for
    reason: str | None  # vLLM's finish reason, if the request has ended


OnTokens = Callable[[int, TokenDelta], bool]  # (index of the response, its new tokens) -> is the request complete?
Joining = Callable[[bool], Sequence[TokenRequest]]  # (is nothing running?) -> requests to add now


class VllmRunner:
    """Steps vLLM's engine in this process: repeatable, and can be aborted between any two tokens."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        # Read by vLLM when the engine is built; the default is a child process.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm.engine.arg_utils import EngineArgs  # pyright: ignore[reportMissingImports]
        from vllm.v1.engine.llm_engine import LLMEngine  # pyright: ignore[reportMissingImports]

        self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        self._count = 0

    @property
    def dead(self) -> bool:
        """Whether one of vLLM's own processes (tensor parallelism) has died: the engine cannot go on without it."""
        return getattr(self._engine.model_executor, "is_failed", False)

    def run(self, on_tokens: OnTokens, joining: Joining, abort: AbortSignal | None) -> None:
        """Runs until every request is complete or `abort` is set; then no request is running any more.

        `joining` is called before each step. The run ends if nothing is running and `joining` returns no request.
        Raises `EngineDeadError` if one of vLLM's own processes died.
        """
        running: dict[str, int] = {}
        with self._known_death():
            try:
                while not (abort is not None and abort.is_set()):
                    for request in joining(not running):
                        self._count += 1
                        running[str(self._count)] = request.index
                        self._engine.add_request(str(self._count), {"prompt_token_ids": request.ids}, request.params)
                    if not running:
                        return
                    self._step(running, on_tokens)
            finally:
                if running:
                    self._engine.abort_request(list(running))

    def _step(self, running: dict[str, int], on_tokens: OnTokens) -> None:
        """Samples tokens for the `running` requests, and removes those that are complete."""
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

    def load(self, weights: SharedWeights) -> list[list[str]]:
        """Loads weights and resets the prefix cache; returns, for each worker, the parameters that were not loaded.

        Raises `EngineDeadError` if one of vLLM's own processes died.
        """
        # Other processes of this machine can open the unnamed file under this path.
        path = f"/proc/{os.getpid()}/fd/{weights.descriptor}"
        with self._known_death():
            missing = self._engine.collective_rpc("load_published", args=(path, weights.entries))
            if not self._engine.reset_prefix_cache():
                raise TrimtabError("vLLM did not reset its prefix cache: requests are still running")
        return missing

    def close(self) -> None:
        self._engine.engine_core.shutdown()

    @contextlib.contextmanager
    def _known_death(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if self.dead:
                raise EngineDeadError(f"one of vLLM's processes died ({error}); its own output says why") from error
            raise


def to_delta(output: Any) -> TokenDelta:
    """Converts a vLLM `RequestOutput` of one sample with `RequestOutputKind.DELTA`."""
    [new] = output.outputs
    mask = getattr(new, "sampling_mask", None)
    return TokenDelta(
        ids=new.token_ids,
        kept=None if mask is None else mask.token_ids,
        logps=[{id_: value.logprob for id_, value in entry.items()} for entry in new.logprobs or ()],
        cached=output.num_cached_tokens or 0,
        prompt=[
            entry[id_].logprob
            for id_, entry in zip(output.prompt_token_ids[1:], (output.prompt_logprobs or ())[1:], strict=False)
        ],
        reason=new.finish_reason,
    )
