"""The specification of an engine for another process: JSON, and a folder of model files.

It is one of

    {"type": "embedded", "model": folder, "dtype": "bfloat16", "quantization": {"bits": null, "noise": 0.0, "seed": 0},
     "routes": false unless given, "numerics": "native" unless given}
    {"type": "vllm", "model": folder, "engine": the [engine] section of a recipe}

The folder needs no weights (config, generation config and tokenizer are enough): they arrive by
`Engine.update_weights`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from trimtab.errors import TrimtabError, did_you_mean
from trimtab.trainer.config import Config, EngineConfig
from trimtab.trainer.engines.embedded.embedded_engine import EmbeddedEngine
from trimtab.trainer.engines.embedded.weight_quantization import BITS, WeightQuantization
from trimtab.trainer.engines.stopping import generation_config
from trimtab.trainer.models import invariant
from trimtab.trainer.models.load import default_device
from trimtab.trainer.models.matmul import use_fast_linear
from trimtab.trainer.models.quiet import silence_transformers
from trimtab.trainer.seeds import derive
from trimtab.types import Engine


def engine_spec(config: Config, folder: Path) -> dict[str, Any]:
    """Returns the engine of the recipe as `build_from_spec` takes it: JSON, for another process."""
    if config.engine.type == "vllm":
        return {"type": "vllm", "model": str(folder.absolute()), "engine": config.engine.model_dump(mode="json")}
    quantization = weight_quantization(config)
    return {
        "type": "embedded",
        "model": str(folder.absolute()),
        "dtype": config.engine.dtype,
        "quantization": {"bits": quantization.bits, "noise": quantization.noise, "seed": quantization.seed},
        "routes": config.routing.replay == "rollout",
        "numerics": config.numerics,
    }


def build_from_spec(spec: Mapping[str, Any]) -> Engine:
    """Returns the engine that `spec` describes. Its weights are arbitrary until weights are published.

    Raises:
        TrimtabError: an unknown type, a folder that holds no model, or what the engine itself refuses.
    """
    builders = {"embedded": _embedded, "vllm": _vllm}
    if spec["type"] not in builders:
        raise TrimtabError(f"unknown type of engine {spec['type']!r}{did_you_mean(spec['type'], builders)}")
    folder = Path(spec["model"])
    if not (folder / "config.json").is_file():
        raise TrimtabError(f"model folder {str(folder)!r} has no config.json; give a folder written by save_pretrained")
    return builders[spec["type"]](spec, folder)


def _embedded(spec: Mapping[str, Any], folder: Path) -> Engine:
    with silence_transformers():
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        # Float32 whatever the engine's dtype: the engine casts the parameters itself and must get unrounded buffers.
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
        # It names the end-of-sequence ids.
        model.generation_config = generation_config(folder) or model.generation_config
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    use_fast_linear(model.base_model)
    if spec.get("numerics") == "invariant":
        invariant.make_invariant(model)
    model.to(default_device())
    quantization, routes = WeightQuantization(**spec["quantization"]), spec.get("routes", False)
    return EmbeddedEngine(model.eval(), tokenizer, spec["dtype"], quantization=quantization, routes=routes)


def _vllm(spec: Mapping[str, Any], folder: Path) -> Engine:
    from trimtab.trainer.engines.vllm.vllm_engine import VllmEngine

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    return VllmEngine(folder, tokenizer, EngineConfig.model_validate(spec["engine"]))


def weight_quantization(config: Config) -> WeightQuantization:
    """Returns the quantization and noise that the recipe applies to the sampler's weights."""
    return WeightQuantization(BITS[config.engine.quantize], config.engine.noise, derive(config.seed, "rounding"))
