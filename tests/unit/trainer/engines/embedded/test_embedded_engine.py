"""The embedded engine against full forwards of the model it was made from; its weights change only as a whole."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.engines import COMMON, CONFIGS, forward_logps, processed, prompts, tiny, tokenizer, tokens
from transformers import Gemma2Config, Gemma2ForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig

from trimtab.errors import TrimtabError
from trimtab.trainer.engines.decoding_rows import DecodingRow
from trimtab.trainer.engines.embedded import decoder
from trimtab.trainer.engines.embedded.embedded_engine import EmbeddedEngine
from trimtab.types import Completion, Prompt, SamplingParams

LENGTHS = [5, 1, 17, 30]
FORCED = SamplingParams(max_tokens=20, ignore_stop=True)
TWELVE = SamplingParams(max_tokens=12, ignore_stop=True)


def make(name: str = "llama", dtype: torch.dtype = torch.float32) -> EmbeddedEngine:
    return EmbeddedEngine(tiny(name), tokenizer(), dtype)


STOPS = SamplingParams(max_tokens=40, stop=("a",), stop_ids=(7, 8))  # rows end early and leave the batch
TRUNCATED = SamplingParams(max_tokens=20, temperature=0.7, top_k=20, top_p=0.8, ignore_stop=True)


# Truncation works on logits, whatever made them: both paths of decoding.
@pytest.mark.parametrize(
    ("name", "sampling"), [*((name, STOPS) for name in CONFIGS), ("qwen3-moe", TRUNCATED), ("gpt2", TRUNCATED)]
)
def test_log_probs_and_entropy_equal_a_full_forward(name: str, sampling: SamplingParams, monkeypatch) -> None:
    monkeypatch.setattr(decoder, "PREFILL_TOKENS", 36)  # several prefill blocks, padded ones among them
    engine, model, asked = make(name), tiny(name), prompts(LENGTHS)
    out = engine.generate(asked, 5, sampling, seed=3)
    ends = set()
    for one, group in zip(asked, out, strict=True):
        for completion in group:
            exact = processed(model, one, completion, sampling)
            chosen = exact.gather(-1, torch.from_numpy(completion.response_ids)[:, None])[:, 0]
            np.testing.assert_allclose(completion.logp_behavior, chosen, atol=1e-4)
            entropy = -(exact.exp() * exact.clamp(min=-1e9)).sum(-1)
            np.testing.assert_allclose(completion.entropy, entropy, atol=1e-4)
            ends.add((completion.finish_reason, len(completion.response_ids)))
    if not sampling.ignore_stop:
        assert len(ends) > 3  # the batch really shrank on the way


def test_the_lean_path_is_used_where_it_is_exact() -> None:
    def path(name: str, length: int) -> str:
        engine, [one] = make(name), prompts([length])
        row = DecodingRow(0, 0, np.zeros(4))
        return type(engine._decoder([row], [one], 4, None)).__name__

    lean = {path(name, 30) for name in ("llama", "qwen3", "qwen3-moe")} | {path("mistral-window", 8)}
    assert lean == {"SharedPromptDecoder"}
    assert path("gpt2", 30) == path("mistral-window", 9) == "CachedDecoder"


def assert_exact(completion: Completion, model: Any, asked: Prompt) -> None:
    exact = processed(model, asked, completion, FORCED)
    chosen = exact.gather(-1, torch.from_numpy(completion.response_ids)[:, None])[:, 0].detach()
    np.testing.assert_allclose(completion.logp_behavior, chosen, atol=1e-4)


def test_replaced_linear_maps_are_not_bypassed() -> None:
    class Doubled(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    model, asked = tiny(), prompts([9])
    old = model.model.layers[1].mlp.up_proj
    model.model.layers[1].mlp.up_proj = Doubled(old.in_features, old.out_features, bias=False)
    [[completion]] = EmbeddedEngine(model, tokenizer(), torch.float32).generate(asked, 1, FORCED, seed=0)
    assert_exact(completion, model, asked[0])


@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_weights_changed_in_place_are_those_of_the_next_call(name: str) -> None:
    """Decoding packs its weights: they must not outlive a call."""
    engine, model, asked = make(name), tiny(name), prompts([9])
    engine.generate(asked, 2, FORCED, seed=0)
    with torch.no_grad():
        for weights in (dict(engine.named_weights()), dict(model.named_parameters())):
            for part in ("self_attn.q_proj", "self_attn.o_proj"):
                weights[f"model.layers.1.{part}.weight"].mul_(3)
    [[completion, _]] = engine.generate(asked, 2, FORCED, seed=0)
    assert_exact(completion, model, asked[0])


def test_sampled_frequencies_match_the_exact_distribution() -> None:
    """Chi-square of the first two tokens together, and the mean importance ratio of a bfloat16 engine."""
    engine, [one] = make(), prompts([6])
    sampling = SamplingParams(max_tokens=2, top_k=6, ignore_stop=True)
    [group] = engine.generate([one], 4000, sampling, seed=11)
    pairs, counts = np.unique([c.response_ids for c in group], axis=0, return_counts=True)
    by_pair = {tuple(c.response_ids): float(c.logp_behavior.sum()) for c in group}
    expected = 4000 * np.exp([by_pair[tuple(pair)] for pair in pairs])
    common = expected > 5
    statistic = ((counts - expected)[common] ** 2 / expected[common]).sum()
    freedom = common.sum()
    assert freedom > 10
    assert statistic < freedom + 4 * np.sqrt(2 * freedom)
    assert expected.sum() == pytest.approx(4000, rel=0.02)  # nearly every pair was seen


def test_mean_ratio_of_exact_to_behavior_is_one() -> None:
    """E_mu[pi/mu] = 1 holds only if mu is what really sampled: here mu is bfloat16 and pi float32."""
    model, sampling = tiny("qwen3"), SamplingParams(max_tokens=1, ignore_stop=True)
    [one] = prompts([6])
    [group] = make("qwen3", torch.bfloat16).generate([one], 4000, sampling, seed=2)
    exact = processed(model, one, group[0], sampling)[0]
    log_ratio = np.array([float(exact[c.response_ids[0]] - c.logp_behavior[0]) for c in group])
    assert np.abs(log_ratio).max() > 1e-3  # the numerics do differ
    ratio = np.exp(log_ratio)
    assert abs(ratio.mean() - 1) < 4 * ratio.std() / np.sqrt(len(ratio))


def test_edges_of_the_arguments() -> None:
    engine = make()
    assert engine.generate([], 4, SamplingParams(), seed=0) == []
    [[one]] = engine.generate(prompts([3]), 1, SamplingParams(max_tokens=1), seed=0)
    assert len(one.response_ids) == 1
    [[last]] = engine.generate(prompts([100]), 1, SamplingParams(max_tokens=28, ignore_stop=True), seed=0)
    assert len(last.response_ids) == 28  # exactly the context
    with pytest.raises(TrimtabError, match=r"'p0'.*128"):
        engine.generate(prompts([100]), 1, SamplingParams(max_tokens=29), seed=0)


def sampled(engine: EmbeddedEngine) -> list[list[list[int]]]:
    return tokens(engine.generate(prompts([4, 9]), 4, TWELVE, seed=0))


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


SHORT = prompts([3, 9, 15])
GEMMA = COMMON | {"num_attention_heads": 4, "head_dim": 8, "query_pre_attn_scalar": 8}


def answers_of(model: Any) -> list[list[Completion]]:
    engine = EmbeddedEngine(model, tokenizer(), torch.float32)
    return engine.generate(SHORT, 2, SamplingParams(max_tokens=12, ignore_stop=True), seed=0)


def largest_gap(model: Any, answers: list[list[Completion]]) -> float:
    """Between the log-probs of the answers and those of one forward pass of the model for each."""
    pairs = zip(chain(*answers), forward_logps(model, SHORT, answers), strict=True)
    return max(np.abs(one.logp_behavior - logp).max() for one, logp in pairs)


def test_log_probs_are_those_of_the_capped_model() -> None:
    torch.manual_seed(0)
    caps = {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 5.0}
    model = Gemma2ForCausalLM(Gemma2Config(**GEMMA, **caps, sliding_window=8)).eval()
    answers = answers_of(model)
    model.set_attn_implementation("eager")
    assert largest_gap(model, answers) < 1e-4
    model.set_attn_implementation("sdpa")
    assert largest_gap(model, answers) > 1e-2  # the cap matters in this model: the comparison above can fail


def test_log_probs_are_those_of_the_model_beyond_its_window() -> None:
    torch.manual_seed(0)
    config = Gemma3TextConfig(**GEMMA, sliding_window=6, sliding_window_pattern=2)
    model = Gemma3ForCausalLM(config).eval()
    answers = answers_of(model)
    assert largest_gap(model, answers) < 1e-4
    config.sliding_window = 64
    unwindowed = Gemma3ForCausalLM(config).eval()
    unwindowed.load_state_dict(model.state_dict())
    assert largest_gap(unwindowed, answers) > 1e-2  # the window matters in this model
