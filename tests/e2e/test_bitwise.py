"""Operations of sampler and trainer compared: equal with invariant numerics, and one native operation is found."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.engines import EOS, tiny, tokenizer
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from trimtab.errors import TrimtabError
from trimtab.trainer.bitwise import engine_and_trainer
from trimtab.trainer.bitwise.difference import Comparison, Difference
from trimtab.trainer.bitwise.engine_and_trainer import (
    HEAD,
    LENGTHS,
    SamplerAndTrainer,
    compare_sampler_and_trainer,
    make_texts,
)
from trimtab.trainer.engines.embedded.embedded_engine import EmbeddedEngine
from trimtab.trainer.models import invariant, matmul, packed_attention
from trimtab.trainer.models.invariant.invariant_layers import InvariantEmbedding

pytestmark = pytest.mark.e2e

OPERATIONS = 3 * 12 + 4  # as in tests/unit/trainer/bitwise/test_difference.py, with the head's log-probs for the head


def sides(
    *, numerics: str = "invariant", mixed: bool = True, name: str = "llama", context: int = 24
) -> SamplerAndTrainer:
    """Float32 under bfloat16 autocast against bfloat16, as the recipes are; or float32 on both sides.

    A small context makes the texts short, and a comparison quick.
    """
    model = tiny(name)
    model.config.max_position_embeddings = context
    if numerics == "invariant":
        invariant.make_invariant(model)
    else:
        matmul.use_fast_linear(model.base_model)
        model.set_attn_implementation(packed_attention.PACKED_IMPLEMENTATION)
    engine = EmbeddedEngine(model, tokenizer(), "bfloat16" if mixed else "float32")
    return SamplerAndTrainer(
        engine, model.train(), (lambda: torch.autocast("cpu", dtype=torch.bfloat16)) if mixed else nullcontext, 0.7
    )


def first(pair: SamplerAndTrainer) -> Difference:
    result = compare_sampler_and_trainer(pair, EOS).first
    assert result is not None
    return result


@pytest.mark.parametrize(("name", "mixed"), [("llama", True), ("qwen2", False), ("qwen3", True)])
def test_invariant_numerics_are_equal_bit_for_bit(name: str, mixed: bool) -> None:
    expected = {"llama": OPERATIONS, "qwen2": OPERATIONS, "qwen3": OPERATIONS + 3 * 2}[
        name
    ]  # norms of queries and keys
    # Of every response all tokens but the last are run: 128 + 151 - 8, and in the small context 28 + 32 - 8.
    context, tokens = (160, 271) if name == "llama" else (24, 52)
    result = compare_sampler_and_trainer(sides(mixed=mixed, name=name, context=context), EOS)
    assert result == Comparison(tokens, expected, None, ((), ()))


def test_native_numerics_differ_first_where_attention_does() -> None:
    result = first(sides(numerics="native", mixed=False))
    assert (result.operation, result.kind, result.half) == (
        "model.layers.0.self_attn (attention)",
        "attention",
        "output",
    )
    assert result.largest is not None
    assert result.largest < 1e-4


def test_native_mixed_precision_differs_from_the_first_weight_on() -> None:
    result = first(sides(numerics="native"))
    assert (result.operation, result.types) == ("model.embed_tokens", ("bfloat16", "float32"))
    assert result.weights == "weight is bfloat16 and float32, and equal once rounded"


def become(path: str, kind: type[nn.Module], **attributes: Any) -> Callable[[Any], None]:
    def swap(model: Any) -> None:
        module = model.get_submodule(path)
        module.__class__ = kind
        for key, value in attributes.items():
            setattr(module, key, value)

    return swap


class ExactRotary(LlamaRotaryEmbedding):
    """Angles in float64: other bits, and better ones."""

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = torch.cat([position_ids[..., None].double() * self.inv_freq.double()] * 2, -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class Float64Linear(nn.Linear):
    """Sums in float64, rounded once."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(input.double(), self.weight.double()).to(input.dtype)


def native_attention(model: Any) -> None:
    layer = model.model.layers[1].self_attn
    layer.config = copy.deepcopy(layer.config)
    layer.config._attn_implementation = packed_attention.PACKED_IMPLEMENTATION


# Rounded to bfloat16, sums and the activation mostly have the bits of other ones.
FLOAT32 = ("linear", "activation")
SWAPS = {
    "linear": ("model.layers.1.mlp.down_proj", become("model.layers.1.mlp.down_proj", Float64Linear)),
    "norm": ("model.layers.2.input_layernorm", become("model.layers.2.input_layernorm", LlamaRMSNorm)),
    "activation": ("model.layers.0.mlp.act_fn", become("model.layers.0.mlp.act_fn", nn.SiLU, inplace=False)),
    "rotary": ("model.rotary_emb", become("model.rotary_emb", ExactRotary)),
    "attention": ("model.layers.1.self_attn (attention)", native_attention),
    "embedding": ("model.embed_tokens", become("model.embed_tokens", nn.Embedding)),
}


@pytest.mark.parametrize("kind", list(SWAPS))
def test_one_native_operation_in_the_trainer_is_named(kind: str) -> None:
    path, swap = SWAPS[kind]
    pair = sides(mixed=kind not in FLOAT32)
    swap(pair.trainer)
    result = first(pair)
    assert (result.operation, result.kind, result.half) == (path, kind, "output")
    assert result.tokens > 0


@pytest.mark.parametrize("kind", ["linear", "activation"])
def test_one_native_operation_in_the_sampler_is_named(kind: str) -> None:
    path, swap = SWAPS[kind]
    pair = sides(mixed=False)
    swap(pair.sampler._model)
    result = first(pair)
    assert (result.operation, result.kind) == (path, kind)


def test_another_head_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        engine_and_trainer,
        "log_probs",
        lambda logits, ids, heat: (logits / heat).log_softmax(-1).gather(1, ids[:, None])[:, 0],
    )
    result = first(sides())
    assert (result.operation, result.kind, result.half) == (HEAD, "head", "output")


def test_a_stale_weight_is_distinguished_from_other_arithmetic() -> None:
    pair = sides()
    pair.sampler._model.model.layers[1].mlp.up_proj.weight.data[3, 4] += 0.5
    result = first(pair)
    assert result.operation == "model.layers.1.mlp.up_proj"
    assert result.weights is not None
    assert result.weights.startswith("weight differs in 1 of ")


def test_position_and_token_id_identify_a_text() -> None:
    """Position and id say which text a token is of: the premise of every comparison."""
    for vocabulary, context in ((14, 64), (97, 128), (50_000, None)):
        result = make_texts(vocabulary, [12], context)
        longest = max(len(result.prompts[o]) + len(r) for o, r in zip(result.owner, result.responses, strict=True))
        assert longest <= (context or 10**6)
        assert not any({0, 12} & {*map(int, ids)} for ids in [*result.prompts, *result.responses])
        texts_by_token: dict[tuple[int, int], tuple[int, int]] = {}
        whole = [
            (o, np.concatenate([result.prompts[o], r])) for o, r in zip(result.owner, result.responses, strict=True)
        ]
        for text, (owner, ids) in enumerate(whole):
            for place, token in enumerate(ids):
                prompted = place < len(result.prompts[owner])
                name = (owner, -1) if prompted else (owner, text)
                assert texts_by_token.setdefault((place, int(token)), name) == name
    assert [len(ids) for ids in result.prompts] == [prompt for prompt, _ in LENGTHS]
    with pytest.raises(TrimtabError, match="vocabulary of 9 ids is too small"):
        make_texts(9, [3], None)


def test_precision_is_the_trainers_own() -> None:
    """Without its autocast the trainer's products are float32: the comparison sees what the recipe runs."""
    result = first(replace(sides(), precision=nullcontext))
    assert isinstance(sides().trainer.model.embed_tokens, InvariantEmbedding)
    assert result.operation == "model.embed_tokens"
