"""Builds the engine of a recipe in this process: embedded or vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from trimtab.trainer.config import Config
from trimtab.trainer.engines.embedded.embedded_engine import EmbeddedEngine
from trimtab.trainer.engines.embedded.weight_quantization import weight_quantization
from trimtab.trainer.engines.stopping import generation_config
from trimtab.trainer.models import invariant
from trimtab.trainer.models.load import LoadedModel, default_device
from trimtab.trainer.models.matmul import use_fast_linear
from trimtab.trainer.models.quiet import silence_transformers
from trimtab.types import Engine


def build_engine(config: Config, folder: Path, loaded: LoadedModel | None = None) -> Engine:
    """Returns the embedded or the vLLM engine of a recipe.

    Args:
        folder: config, generation config and tokenizer of the model.
        loaded: the model that is trained; None where it is in another process: the weights of the engine are then
            arbitrary until some are published.
    """
    if config.engine.type == "vllm":
        from trimtab.trainer.engines.vllm.vllm_engine import VllmEngine

        tokenizer = _tokenizer(folder) if loaded is None else loaded.tokenizer
        return VllmEngine(folder, tokenizer, config.engine)
    model, tokenizer, _ = loaded or _without_weights(config, folder)
    dtype, routes = getattr(torch, config.engine.dtype), config.routing.replay == "rollout"
    return EmbeddedEngine(model, tokenizer, dtype, quantization=weight_quantization(config), routes=routes)


def _without_weights(config: Config, folder: Path) -> LoadedModel:
    with silence_transformers():
        shape = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        # Float32 whatever the engine's dtype: the engine casts the parameters itself and must get unrounded buffers.
        model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32, trust_remote_code=False)
        # It names the end-of-sequence ids.
        model.generation_config = generation_config(folder) or model.generation_config
        tokenizer = _tokenizer(folder)
    use_fast_linear(model.base_model)
    if config.numerics == "invariant":
        invariant.make_invariant(model)
    return LoadedModel(model.to(default_device()).eval(), tokenizer, str(folder))


def _tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
