"""The receipt of a preflight: every choice that can change bits, and one digest over all of them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from trimtab.preflight.engine_pair import SEED, EnginePair
from trimtab.runs.provenance import hardware, versions
from trimtab.trainer.config import Config
from trimtab.trainer.engines.weight_manifest import tensor_bytes
from trimtab.trainer.models.lora import named_weights

ENVIRONMENT = (
    *("ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA"),
    *("ONEDNN_DEFAULT_FPMATH_MODE", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "VLLM_BATCH_INVARIANT"),
    "VLLM_ATTENTION_BACKEND",
)
"""Environment variables that select kernels."""
IRRELEVANT = {
    "hang_timeout": True,
    "canary": True,
    "server": {"urls", "model", "timeout", "reconnect_timeout", "folder"},
}
"""Keys of `engine` that change no bit."""


def receipt(config: Config, trainer: str, pair: EnginePair, lengths: Sequence[int]) -> dict[str, Any]:
    """Returns the choices by name, and as `sha256` the digest of their JSON with sorted keys and without spaces.

    Of a server only what the recipe says is known: not its versions, options or machine.
    """
    model = pair.trainer.model
    device = next(model.parameters()).device
    choices = {
        "versions": versions(config.engine.type),
        "hardware": {
            "cpu": hardware()["cpu"],
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "device": device.type,
            "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
            "gpu_capability": torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        },
        "threads": torch.get_num_threads(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
        "numerics": config.numerics,
        "sampler": config.engine.model_dump(mode="json", exclude=IRRELEVANT),
        "trainer": {"forward": trainer, **config.model.model_dump(mode="json", exclude={"path"})},
        "attention": {
            "sampler": getattr(pair.engine, "attention", None),
            "trainer": model.config._attn_implementation,
        },
        "model_sha256": model_digest(model),
        "model_config_sha256": _digest({**model.config.to_dict(), "_name_or_path": ""}),
        "tokenizer_sha256": tokenizer_digest(pair.tokenizer),
        "prompts_sha256": _digest([prompt.ids.tolist() for prompt in pair.prompts]),
        "sampling": asdict(pair.sampling),
        "lengths": sorted(lengths),
        "seed": {"recipe": config.seed, "sampling": SEED},
    }
    choices = json.loads(json.dumps(choices))
    return {"sha256": _digest(choices), **choices}


def model_digest(model: Any) -> str:
    """Returns the SHA-256 over name, dtype, shape and bytes of every weight, adapters merged, in the order of names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(named_weights(model), key=lambda item: item[0]):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor_bytes(tensor))
    return digest.hexdigest()


def tokenizer_digest(tokenizer: Any) -> str:
    """Returns the SHA-256 over vocabulary, rules, special tokens and chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = {} if backend is None else json.loads(backend.to_str())
    for changed_by_calls in ("padding", "truncation"):
        rules.pop(changed_by_calls, None)
    template = getattr(tokenizer, "chat_template", None)
    return _digest([rules, sorted(tokenizer.get_vocab().items()), tokenizer.all_special_ids, template])


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
