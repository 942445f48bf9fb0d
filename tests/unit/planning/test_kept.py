"""What the layers keep for the backward, counted from the tensors autograd saves, against the formula."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from trimtab.models import packed_attention
from trimtab.models.logprobs import TokenBatch, score
from trimtab.planning.estimates import Rank, rank_memory
from trimtab.planning.inputs import Shape

ROWS, PROMPT, RESPONSE = 24, 16, 41
SHAPE = Shape("small", 3, 96, 6, 2, 16, 256, 300, tied=False)


def model(kind: str) -> PreTrainedModel:
    config = AutoConfig.for_model(
        kind,
        hidden_size=SHAPE.hidden,
        intermediate_size=SHAPE.intermediate,
        num_hidden_layers=SHAPE.layers,
        num_attention_heads=SHAPE.heads,
        num_key_value_heads=SHAPE.kv,
        head_dim=SHAPE.size,
        vocab_size=SHAPE.vocabulary,
        tie_word_embeddings=False,
    )
    config._attn_implementation = packed_attention.PACKED_IMPLEMENTATION
    return AutoModelForCausalLM.from_config(config).train()


def kept(model: PreTrainedModel) -> int:
    """Bytes of every storage saved in a forward, parameters not counted."""
    numbers = np.random.default_rng(0)
    batch = TokenBatch.pack(
        [numbers.integers(SHAPE.vocabulary, size=PROMPT)],
        list(numbers.integers(SHAPE.vocabulary, size=(ROWS, RESPONSE))),
        [0] * ROWS,
        pad_id=0,
    )
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    result: dict[int, Any] = {}  # the storages themselves: a freed address would be used again

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            result[storage.data_ptr()] = storage
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", dtype=torch.bfloat16):
        score(model, batch)
    return sum(storage.nbytes() for storage in result.values())


@pytest.mark.parametrize(("kind", "norm"), [("llama", False), ("qwen2", False), ("qwen3", True)])
def test_the_formula_counts_what_autograd_saves(kind: str, norm: bool) -> None:
    shape = replace(SHAPE, qk_norm=norm, qkv_bias=kind == "qwen2")
    # A response's last token predicts nothing and is not run.
    rank = Rank(1, PROMPT + ROWS * (RESPONSE - 1), ROWS * RESPONSE, ROWS, PROMPT, RESPONSE)
    computed = rank_memory(shape, rank)
    assert computed["kept"] + computed["copies"] == pytest.approx(kept(model(kind)), rel=0.03)
