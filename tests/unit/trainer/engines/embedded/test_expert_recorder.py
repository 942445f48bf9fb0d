"""The experts of every token that an engine runs: those of a plain forward, whatever path the token took."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.engines import COMMON, After, prompts, tiny, tokenizer, tokens
from transformers import AutoModelForCausalLM, MixtralConfig, OlmoeConfig

from trimtab.errors import TrimtabError
from trimtab.trainer.engines.embedded import embedded_engine, shared_prompt_decoder
from trimtab.trainer.engines.embedded.decoder import CachedDecoder
from trimtab.trainer.engines.embedded.embedded_engine import EmbeddedEngine
from trimtab.types import Completion, Prompt, SamplingParams

LENGTHS = [5, 1, 17, 30]
STOPS = SamplingParams(max_tokens=20, stop=("a",), stop_ids=(7, 8))
FREE = SamplingParams(max_tokens=10, ignore_stop=True)
SIZES = COMMON | {"intermediate_size": 24}
# The middle layer of the first is dense.
LAYERS = {"qwen3-moe": 2, "mixtral": 3, "olmoe": 3}


def make(name: str, seed: int = 0) -> Any:
    if name == "qwen3-moe":
        return tiny(name, seed)
    config: Any = (
        MixtralConfig(**SIZES, num_local_experts=6)
        if name == "mixtral"
        else OlmoeConfig(**SIZES, num_experts=6, num_experts_per_tok=2)
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config).eval()


def engine_of(model: Any, *, routes: bool = True) -> EmbeddedEngine:
    return EmbeddedEngine(model, tokenizer(), torch.float32, routes=routes)


@torch.no_grad()
def chosen(model: Any, asked: Prompt, completion: Completion) -> np.ndarray:
    """What the routers of one plain forward over the whole text choose, (prompt + response - 1, layers, k)."""
    seen: list[torch.Tensor] = []
    gates = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    hooks = [gate.register_forward_hook(lambda _gate, _given, out: seen.append(out[2])) for gate in gates]
    ids = np.concatenate([asked.ids, completion.response_ids[:-1]])
    model(input_ids=torch.from_numpy(ids)[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(seen, 1).numpy()


def same_experts(result: np.ndarray | None, expected: np.ndarray) -> bool:
    return result is not None and np.array_equal(np.sort(result, -1), np.sort(expected, -1))


@pytest.mark.parametrize("name", list(LAYERS))
@pytest.mark.parametrize("sampling", [STOPS, FREE], ids=["stops", "forced"])
def test_every_token_that_is_run_has_the_experts_of_a_plain_forward(name: str, sampling: SamplingParams) -> None:
    """Prompts and prefixes of several lengths, samples that share a prompt, rows that leave early."""
    model, asked = make(name), prompts(LENGTHS)
    groups = engine_of(model).generate(asked, 5, sampling, seed=1)
    lengths = set()
    for one, group in zip(asked, groups, strict=True):
        for answer in group:
            assert answer.routed_experts.dtype == np.int16
            assert answer.routed_experts.shape == (len(one.ids) + len(answer.response_ids) - 1, LAYERS[name], 2)
            assert same_experts(answer.routed_experts, chosen(model, one, answer))
            lengths.add(len(answer.response_ids))
    assert len(lengths) > 3 or sampling is FREE


def test_prompts_in_several_blocks_and_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimtab.trainer.engines.embedded.decoder.PREFILL_TOKENS", 20)
    monkeypatch.setattr(embedded_engine, "CACHE_BYTES", 100_000)
    monkeypatch.setattr(shared_prompt_decoder, "BLOCK", 4)
    model, asked = make("qwen3-moe"), prompts([9, 3, 14, 9, 2, 30])
    for one, group in zip(asked, engine_of(model).generate(asked, 3, FREE, seed=1), strict=True):
        assert all(same_experts(answer.routed_experts, chosen(model, one, answer)) for answer in group)


def test_a_model_with_a_window_takes_the_other_path(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    monkeypatch.setattr(embedded_engine, "supports", lambda _model: False)
    monkeypatch.setattr(embedded_engine, "CachedDecoder", lambda *given: used.append(1) or CachedDecoder(*given))
    model, asked = make("qwen3-moe"), prompts(LENGTHS)
    for one, group in zip(asked, engine_of(model).generate(asked, 3, STOPS, seed=1), strict=True):
        assert all(same_experts(answer.routed_experts, chosen(model, one, answer)) for answer in group)
    assert used


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral"])
def test_recording_changes_no_bit_and_is_off_unless_asked_for(name: str) -> None:
    model, asked = make(name), prompts(LENGTHS)
    plain, watched = (engine_of(model, routes=on).generate(asked, 4, STOPS, seed=2) for on in (False, True))
    assert tokens(plain) == tokens(watched)
    for one, other in zip(chain(*plain), chain(*watched), strict=True):
        assert one.logp_behavior.tobytes() == other.logp_behavior.tobytes()
        assert one.routed_experts is None
        assert other.routed_experts is not None


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral"])
def test_an_interrupted_response_keeps_what_was_recorded_of_its_beginning(name: str) -> None:
    """The first tokens were run by the old policy, all others by the new one; each has its own policy's experts."""
    old, new, asked = make(name), make(name, seed=1), prompts(LENGTHS)
    engine = engine_of(old)
    begun = engine.generate(asked, 3, FREE, seed=3, abort=After(4))
    engine.update_weights(new.named_parameters(), 1)
    done = engine.generate(asked, 3, FREE, seed=3, prefixes=begun)
    for one, prefixes, group in zip(asked, begun, done, strict=True):
        for prefix, answer in zip(prefixes, group, strict=True):
            assert prefix.finish_reason == "abort"
            run = len(one.ids) + len(prefix.response_ids) - 1
            assert len(prefix.routed_experts) == run
            assert np.array_equal(answer.routed_experts[:run], prefix.routed_experts)
            assert same_experts(prefix.routed_experts, chosen(old, one, prefix))
            assert same_experts(answer.routed_experts[run:], chosen(new, one, answer)[run:])
            assert not same_experts(answer.routed_experts, chosen(new, one, answer))


def test_a_prefix_without_a_record_gets_one_from_this_engine_s_pass_over_it() -> None:
    model, asked = make("qwen3-moe"), prompts(LENGTHS)
    completions = engine_of(model, routes=False).generate(asked, 3, FREE, seed=3)
    begun = [[answer.truncated(1 + place) for place, answer in enumerate(group)] for group in completions]
    for one, group in zip(asked, engine_of(model).generate(asked, 3, FREE, seed=3, prefixes=begun), strict=True):
        assert all(same_experts(answer.routed_experts, chosen(model, one, answer)) for answer in group)


def test_an_engine_that_does_not_record_claims_nothing_about_its_tokens() -> None:
    model, asked = make("qwen3-moe"), prompts([5])
    [[whole]] = engine_of(model).generate(asked, 1, FREE, seed=3)
    plain = engine_of(model, routes=False)
    [[grown]] = plain.generate(asked, 1, FREE, seed=3, prefixes=[[whole.truncated(3)]])
    assert grown.routed_experts is None
    [[back]] = plain.generate(asked, 1, FREE, seed=3, prefixes=[[whole]])
    assert np.array_equal(back.routed_experts, whole.routed_experts)


def test_a_prefix_whose_record_does_not_fit_is_refused() -> None:
    model, asked = make("qwen3-moe"), prompts([5])
    engine = engine_of(model)
    [[whole]] = engine.generate(asked, 1, FREE, seed=3)
    short = whole.truncated(3)
    broken = replace(short, routed_experts=short.routed_experts[:-1])
    with pytest.raises(TrimtabError, match="experts are recorded for 6 tokens, but 7 were run"):
        engine.generate(asked, 1, FREE, seed=3, prefixes=[[broken]])


def test_dense_models_have_nothing_to_record() -> None:
    with pytest.raises(TrimtabError, match="it is dense"):
        engine_of(tiny("llama"))


def test_cutting_keeps_one_entry_for_every_token_that_was_run() -> None:
    """A prompt of 4 and a response of 3 tokens: 6 were run."""

    one = Completion(
        response_ids=np.array([7, 8, 9]),
        logp_behavior=np.zeros(3, dtype=np.float32),
        policy_version=np.zeros(3, dtype=np.int64),
        finish_reason="length",
        text="",
        routed_experts=np.arange(6, dtype=np.int16)[:, None, None],
    )
    assert [one.truncated(k).routed_experts.ravel().tolist() for k in range(4)] == [[*range(k)] for k in (3, 4, 5, 6)]


@pytest.mark.parametrize("change", [lambda r: r[:, :, :1], lambda r: r[:, :1], lambda r: r + 6, lambda r: r - 6])
def test_a_prefix_with_another_models_experts_is_refused(change: Any) -> None:
    engine, asked = engine_of(make("mixtral")), prompts([5])
    [[begun]] = engine.generate(asked, 1, FREE, seed=0, abort=After(3))
    foreign = replace(begun, routed_experts=change(begun.routed_experts))
    with pytest.raises(TrimtabError, match="records experts that this model does not have: it has 3 mixture layers"):
        engine.generate(asked, 1, FREE, seed=0, prefixes=[[foreign]])
