"""Interrupted calls: what comes back is a valid beginning, and going on from it loses nothing."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch
from tests.support.engines import After, prompts, tiny, tokenizer, tokens

from trimtab.trainer.engines.embedded import embedded_engine
from trimtab.trainer.engines.embedded.embedded_engine import EmbeddedEngine
from trimtab.types import SamplingParams

LENGTHS = [5, 1, 17, 30]
STOPS = SamplingParams(max_tokens=24, stop=("a",), stop_ids=(7, 8))
TRUNCATED = SamplingParams(max_tokens=14, temperature=0.7, top_k=20, top_p=0.8, ignore_stop=True)
FREE = SamplingParams(max_tokens=12, ignore_stop=True)


def make(name: str = "llama", seed: int = 0) -> EmbeddedEngine:
    return EmbeddedEngine(tiny(name, seed), tokenizer(), torch.float32)


@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "gpt2"])
@pytest.mark.parametrize("sampling", [STOPS, TRUNCATED], ids=["stops", "truncated"])
def test_interrupted_again_and_again_it_ends_with_the_uninterrupted_tokens(name: str, sampling: SamplingParams) -> None:
    engine, asked = make(name), prompts(LENGTHS)
    plain = engine.generate(asked, 4, sampling, seed=3)
    completions, calls = None, 0
    while completions is None or any(one.finish_reason == "abort" for one in chain(*completions)):
        completions = engine.generate(asked, 4, sampling, seed=3, prefixes=completions, abort=After(5))
        calls += 1
    assert calls == -(-sampling.max_tokens // 5)
    assert tokens(completions) == tokens(plain)
    for one, whole in zip(chain(*completions), chain(*plain), strict=True):
        assert (one.finish_reason, one.text) == (whole.finish_reason, whole.text)
        np.testing.assert_allclose(one.logp_behavior, whole.logp_behavior, atol=1e-4)
        np.testing.assert_allclose(one.entropy, whole.entropy, atol=1e-4)
        assert all(
            np.array_equal(a, b) for a, b in zip(one.sampling_mask or (), whole.sampling_mask or (), strict=True)
        )


def test_set_before_the_call_nothing_is_run() -> None:
    engine, asked = make(), prompts(LENGTHS)
    out = engine.generate(asked, 2, STOPS, seed=3, abort=After(0))
    assert [(one.finish_reason, len(one.response_ids)) for one in chain(*out)] == [("abort", 0)] * 8
    assert (engine.decoded_tokens, engine.prefilled_tokens) == (0, 0)
    begun = engine.generate(asked, 2, FREE, seed=3, abort=After(3))
    counted = engine.decoded_tokens, engine.prefilled_tokens
    again = engine.generate(asked, 2, FREE, seed=3, prefixes=begun, abort=After(0))
    assert tokens(again) == tokens(begun)
    assert (engine.decoded_tokens, engine.prefilled_tokens) == counted


def test_batches_that_were_not_begun_come_back_too(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, asked = make(), prompts(LENGTHS)
    plain = tokens(engine.generate(asked, 6, FREE, seed=5))
    monkeypatch.setattr(embedded_engine, "CACHE_BYTES", 1 << 17)
    part = engine.generate(asked, 6, FREE, seed=5, abort=After(17))  # in the middle of the second batch
    assert {len(one.response_ids) for one in chain(*part)} == {12, 5, 0}
    assert tokens(engine.generate(asked, 6, FREE, seed=5, prefixes=part)) == plain


def test_a_whole_response_comes_back_as_it_is_and_costs_nothing() -> None:
    engine, asked = make(), prompts([4, 6])
    plain = engine.generate(asked, 3, STOPS, seed=1)
    counted = engine.decoded_tokens, engine.prefilled_tokens
    assert "stop" in {one.finish_reason for one in chain(*plain)}
    again = engine.generate(asked, 3, STOPS, seed=2, prefixes=plain)
    assert (engine.decoded_tokens, engine.prefilled_tokens) == counted
    for one, whole in zip(chain(*again), chain(*plain), strict=True):
        assert (one.finish_reason, one.text) == (whole.finish_reason, whole.text)
        assert np.array_equal(one.logp_behavior, whole.logp_behavior)
    longer = replace(STOPS, max_tokens=30)
    grown = engine.generate(
        asked, 3, longer, seed=1, prefixes=[[one.truncated(24) for one in group] for group in plain]
    )
    assert max(len(one.response_ids) for one in chain(*grown)) > 24
