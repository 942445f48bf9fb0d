"""Rounding of the sampler's weights: exact levels, no drift, and nothing but the matrices it is meant for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.engines import prompts, tiny, tokenizer, tokens

from trimtab.errors import TrimtabError
from trimtab.trainer.engines.embedded.embedded_engine import EmbeddedEngine
from trimtab.trainer.engines.embedded.weight_quantization import NO_QUANTIZATION, WeightQuantization, matrices, quantize
from trimtab.trainer.models.load import load
from trimtab.types import SamplingParams

FORCED = SamplingParams(max_tokens=12, ignore_stop=True)
INT3, NOISY = WeightQuantization(bits=3), WeightQuantization(bits=4, noise=0.1, seed=5)


def engine_of(model, rounding: WeightQuantization, dtype: torch.dtype = torch.float32) -> EmbeddedEngine:
    return EmbeddedEngine(model, tokenizer(), dtype, quantization=rounding)


def bits_of(engine: EmbeddedEngine) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in engine.named_weights()}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_levels_by_hand() -> None:
    """int3 has the levels -3..3, int4 -7..7; halves go to the even level; every row has its own scale."""
    rows = torch.tensor([[3.0, -1.5, 0.6, 0.4], [0.0, 0.0, 0.0, 0.0], [-14.0, 7.0, 3.0, 1.0]])
    assert quantize(rows, 3).tolist() == [
        [3.0, -2.0, 1.0, 0.0],
        [0.0, 0.0, 0.0, 0.0],
        [-14.0, pytest.approx(28 / 3), pytest.approx(14 / 3), 0.0],  # 1.5 levels become 2
    ]
    assert quantize(rows, 4)[2].tolist() == [-14.0, 8.0, 4.0, 0.0]  # 3.5 levels become 4, 1.5 become 2, 0.5 becomes 0
    assert quantize(torch.tensor([[127.0, 1.4, -0.6]]), 8).tolist() == [[127.0, 1.0, -1.0]]


@given(seed=st.integers(0, 2**32 - 1), bits=st.sampled_from([8, 4, 3]), low=st.booleans(), scale=st.floats(1e-6, 1e6))
@settings(max_examples=60, deadline=None)
def test_rounding_twice_changes_no_bit_and_once_at_most_half_a_level(seed, bits, low, scale) -> None:
    drawn = np.random.default_rng(seed).standard_t(3, (5, 33)) * scale
    weight = torch.from_numpy(drawn).to(torch.bfloat16 if low else torch.float32)
    once = quantize(weight, bits)
    assert once.dtype == weight.dtype
    assert torch.equal(quantize(once, bits), once)
    level = weight.double().abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    slack = weight.double().abs() * (2**-8 if low else 2**-22)  # the result is rounded to the dtype once more
    assert bool(((once.double() - weight.double()).abs() <= 0.5 * level + 2 * slack + level * 2**-8 * low).all())
    assert all(len(row.unique()) <= 2**bits - 1 for row in once)


def test_each_expert_has_the_scales_of_its_own_rows() -> None:
    stacked = (
        torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 9.0, 0.1])[:, None, None]
    )
    together = quantize(stacked, 3)
    assert all(torch.equal(together[i], quantize(stacked[i], 3)) for i in range(3))


def test_embedding_head_norms_and_routers_are_left_alone() -> None:
    parts = [*(f"self_attn.{x}_proj.weight" for x in "qkvo"), "mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    inner = {f"model.layers.{i}.{part}" for i in (0, 1) for part in parts}
    assert set(matrices(load("laboratory-moe", dtype=torch.float32).model)) == inner
    assert len(matrices(load("laboratory", dtype=torch.float32).model)) == 2 * 7
    tied = tiny("llama")
    assert not {"model.embed_tokens.weight", "lm_head.weight"} & set(matrices(tied))


def test_a_layout_that_is_not_known_is_refused() -> None:
    with pytest.raises(TrimtabError, match=r"Conv1D.*engine\.quantize"):
        engine_of(tiny("gpt2"), INT3)
    engine_of(tiny("gpt2"), NO_QUANTIZATION)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
@pytest.mark.parametrize("rounding", [INT3, NOISY], ids=["int3", "int4-noise"])
def test_the_sampler_holds_the_rounded_weights_and_the_trainer_its_own(name, rounding, dtype) -> None:
    first, second = tiny(name, seed=0), tiny(name, seed=1)
    before = {key: p.detach().clone() for key, p in second.named_parameters()}
    engine = engine_of(first, rounding, dtype)
    engine.update_weights(second.named_parameters(), version=7)
    assert same(before, dict(second.named_parameters()))
    chosen = set(matrices(second))
    for key, weight in engine.named_weights():
        given = before[key].to(dtype)
        expected = rounding.apply(key, given, 7) if key in chosen else given
        assert torch.equal(weight, expected), key
        assert torch.equal(weight, given) == (key not in chosen), key
    made = engine_of(second, rounding, dtype)
    made.update_weights(second.named_parameters(), version=7)
    assert same(bits_of(engine), bits_of(made))


def test_what_is_sampled_has_the_probabilities_of_the_rounded_weights() -> None:
    """Decoding packs its weights after they were rounded."""
    model, asked = tiny("qwen3-moe"), prompts([4, 9])
    copy = tiny("qwen3-moe")
    with torch.no_grad():
        for name in matrices(copy):
            copy.get_parameter(name).copy_(quantize(copy.get_parameter(name), 3))
    engine, exact = engine_of(model, INT3), engine_of(copy, NO_QUANTIZATION)
    ours, theirs = (x.generate(asked, 4, FORCED, seed=0) for x in (engine, exact))
    assert tokens(ours) == tokens(theirs)
    assert tokens(ours) != tokens(engine_of(model, NO_QUANTIZATION).generate(asked, 4, FORCED, seed=0))


@pytest.mark.parametrize("rounding", [INT3, NOISY], ids=["int3", "int4-noise"])
def test_evaluation_and_putting_back_leave_no_trace(rounding: WeightQuantization) -> None:
    """What training does around an evaluation: exact weights in, the sampler's own back, bit for bit."""
    engine, clean = engine_of(tiny(seed=0), rounding), tiny(seed=1)
    engine.update_weights(tiny(seed=0).named_parameters(), version=3)
    own = bits_of(engine)
    engine.update_weights(clean.named_parameters(), version=4, as_is=True)
    assert same(bits_of(engine), {key: p.detach() for key, p in clean.named_parameters()})
    engine.update_weights(own.items(), version=3, as_is=True)
    assert same(bits_of(engine), own)
    assert engine.policy_version == 3


def test_noise_repeats_with_its_version_and_has_the_size_asked_for() -> None:
    weight = torch.full((64, 64), 2.0)
    noisy = WeightQuantization(noise=0.1, seed=1)
    first = noisy.apply("a", weight, 0)
    assert torch.equal(first, noisy.apply("a", weight, 0))
    others = [noisy.apply("a", weight, 1), noisy.apply("b", weight, 0), replace(noisy, seed=2).apply("a", weight, 0)]
    assert not any(torch.equal(first, other) for other in others)
    assert float((first - weight).std()) == pytest.approx(0.2, rel=0.05)
    assert float((first - weight).mean()) == pytest.approx(0.0, abs=0.02)
