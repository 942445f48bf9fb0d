"""Weights: the engine's are its own, and change only as a whole."""

from __future__ import annotations

import pytest
import torch
from tests.support.engines import prompts, tiny, tokenizer, tokens

from trimtab.errors import TrimtabError
from trimtab.trainer.engines.embedded.embedded_engine import EmbeddedEngine
from trimtab.types import SamplingParams

FORCED = SamplingParams(max_tokens=12, ignore_stop=True)


def sampled(engine: EmbeddedEngine) -> list[list[list[int]]]:
    return tokens(engine.generate(prompts([4, 9]), 4, FORCED, seed=0))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in ("llama", "qwen2", "qwen3", "qwen3-moe", "gpt2")),
        *((name, torch.bfloat16) for name in ("llama", "gpt2")),
    ],
)
def test_a_published_model_samples_like_an_engine_made_from_it(name: str, dtype: torch.dtype) -> None:
    engine = EmbeddedEngine(tiny(name, seed=0), tokenizer(), dtype)
    before = sampled(engine)
    engine.update_weights(tiny(name, seed=1).named_parameters(), version=7)
    fresh = EmbeddedEngine(tiny(name, seed=1), tokenizer(), dtype)
    assert sampled(engine) == sampled(fresh) != before
    for group in engine.generate(prompts([4]), 2, FORCED, seed=0):
        assert all(set(completion.policy_version.tolist()) == {7} for completion in group)
    assert fresh.policy_version == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_is_shared_with_the_trainer(dtype: torch.dtype) -> None:
    model = tiny()
    engine = EmbeddedEngine(model, tokenizer(), dtype)
    before = sampled(engine)
    state = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert sampled(engine) == before
    engine.update_weights(state.items(), version=1)
    assert sampled(engine) == before
    with torch.no_grad():
        for tensor in state.values():
            tensor.zero_()
    assert sampled(engine) == before
    assert all(p.dtype == torch.float32 and p.requires_grad for p in model.parameters())


def test_rotary_frequencies_are_not_rounded() -> None:
    engine = EmbeddedEngine(tiny(), tokenizer(), torch.bfloat16)
    assert torch.equal(engine._model.model.rotary_emb.inv_freq, tiny().model.rotary_emb.inv_freq)


def test_a_diverged_model_is_reported_when_sampling() -> None:
    model = tiny()
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    engine = EmbeddedEngine(model, tokenizer(), torch.float32)
    with pytest.raises(TrimtabError, match="not finite"):
        sampled(engine)
