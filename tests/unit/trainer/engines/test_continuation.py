"""Responses that begin with given tokens, or are interrupted: the engine goes on as a full forward of all would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch
from tests.support.engines import (
    CONFIGS,
    EOS,
    PIECES,
    SIZE,
    After,
    assert_same,
    forward_logps,
    prompt,
    prompts,
    tiny,
    tokenizer,
    tokens,
)

from trimtab.errors import TrimtabError
from trimtab.trainer.engines.embedded import decoder, embedded_engine
from trimtab.trainer.engines.embedded.embedded_engine import EmbeddedEngine
from trimtab.trainer.engines.request import EngineModel, validate_request, validate_vllm_temperature
from trimtab.trainer.models import laboratory
from trimtab.types import Completion, SamplingParams

LENGTHS = [5, 1, 17, 30]
STOPS = SamplingParams(max_tokens=24, stop=("a",), stop_ids=(7, 8))
FREE = SamplingParams(max_tokens=12, ignore_stop=True)
TRUNCATED = SamplingParams(max_tokens=14, temperature=0.7, top_k=20, top_p=0.8, ignore_stop=True)
Groups = list[list[Completion]]


def make(name: str = "llama", dtype: torch.dtype = torch.float32, seed: int = 0) -> EmbeddedEngine:
    return EmbeddedEngine(tiny(name, seed), tokenizer(), dtype)


def begun(groups: Groups, lengths: Sequence[int]) -> Groups:
    """Prefixes of their own responses; sample s of every prompt keeps `lengths[s]` tokens, if it has them."""
    return [[one.truncated(k) for one, k in zip(group, lengths, strict=True)] for group in groups]


def pairs(*groups: Groups) -> list[tuple[Completion, ...]]:
    return list(zip(*(chain(*group) for group in groups), strict=True))


# Truncation works on logits, whatever made them: both paths of decoding.
@pytest.mark.parametrize(
    ("name", "sampling", "lengths"),
    [
        *((name, STOPS, (0, 1, 5, 9, 13)) for name in CONFIGS),
        *((name, TRUNCATED, (4, 4, 4, 4, 4)) for name in ("qwen3-moe", "gpt2")),
    ],
)
def test_a_responses_own_beginning_leads_to_the_same_response(
    name: str, sampling: SamplingParams, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder, "PREFILL_TOKENS", 90)  # several blocks of prefixes, padded ones among them
    engine, asked = make(name), prompts(LENGTHS)
    plain = engine.generate(asked, 5, sampling, seed=3)
    prefixes = begun(plain, lengths)
    again = engine.generate(asked, 5, sampling, seed=3, prefixes=prefixes)
    assert_same(again, plain, atol=1e-4)
    for whole, prefix, completion in pairs(plain, prefixes, again):
        k = len(prefix.response_ids)
        assert np.array_equal(completion.logp_behavior[:k], whole.logp_behavior[:k])
        assert (completion.sampling_mask is None) == (not sampling.truncated)
    assert {len(prefix.response_ids) for prefix in chain(*prefixes)} >= set(lengths)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "qwen3-moe", "mistral-window", "gpt2", "laboratory"])
def test_the_suffix_is_the_current_policys_and_the_prefix_stays_as_it_was(name: str) -> None:
    if name == "laboratory":
        (old, its_tokenizer), (new, _) = laboratory.build(0), laboratory.build(1)
    else:
        old, new, its_tokenizer = tiny(name), tiny(name, seed=1), tokenizer()
    engine = EmbeddedEngine(old, its_tokenizer, torch.float32)
    asked = [replace(one, ids=one.ids % 14) for one in prompts([6, 11, 9])]
    historical = engine.generate(asked, 4, FREE, seed=3)
    engine.update_weights(new.named_parameters(), version=7)
    prefixes = begun(historical, (0, 3, 3, 7))
    mixed = engine.generate(asked, 4, FREE, seed=4, prefixes=prefixes)
    exact = forward_logps(new, asked, mixed)
    behind = forward_logps(old, asked, mixed)
    for prefix, completion, logp, stale in zip(chain(*prefixes), chain(*mixed), exact, behind, strict=True):
        k = len(prefix.response_ids)
        assert completion.policy_version.tolist() == [0] * k + [7] * (12 - k)
        assert np.array_equal(completion.response_ids[:k], prefix.response_ids)
        assert np.array_equal(completion.logp_behavior[:k], prefix.logp_behavior)
        assert np.array_equal(completion.entropy[:k], prefix.entropy)
        np.testing.assert_allclose(completion.logp_behavior[k:], logp[k:], atol=1e-4)
        np.testing.assert_allclose(completion.logp_behavior[:k], stale[:k], atol=1e-4)
        assert np.abs(logp - stale).max() > 0.01  # the two policies do differ


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_shared_prefix_is_run_once_and_changes_nothing(name: str) -> None:
    engine, asked = make(name), prompts(LENGTHS)
    source = engine.generate(asked, 2, FREE, seed=3)
    shared = [[group[0].truncated(5)] * 3 + [group[1].truncated(2)] * 3 for group in source]
    before = engine.prefilled_tokens
    out = engine.generate(asked, 6, FREE, seed=8, prefixes=shared)
    repeated = [2 * n for n in LENGTHS] if name == "gpt2" else LENGTHS  # the general path runs prompt and prefix as one
    assert engine.prefilled_tokens - before == sum(repeated) + 4 * (5 + 2)
    equal = [[replace(prefix, response_ids=prefix.response_ids.copy()) for prefix in group] for group in shared]
    assert tokens(engine.generate(asked, 6, FREE, seed=8, prefixes=equal)) == tokens(out)
    assert engine.prefilled_tokens - before == 2 * (sum(repeated) + 4 * (5 + 2))
    for s in (0, 5):  # one sample's prefix on its own, all others sampled whole
        alone = [[prefix if i == s else Completion.empty() for i, prefix in enumerate(group)] for group in shared]
        completions = engine.generate(asked, 6, FREE, seed=8, prefixes=alone)
        for group, expected in zip(completions, out, strict=True):
            assert group[s].response_ids.tolist() == expected[s].response_ids.tolist()
            np.testing.assert_allclose(group[s].logp_behavior, expected[s].logp_behavior, atol=1e-4)


def test_tokens_are_counted_without_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts of 5 and 3 tokens; rows of 12 tokens that begin with 0, 4, 4 (equal) and 7 tokens."""
    monkeypatch.setattr(embedded_engine, "COMPACT_SHARE", 2)  # finished rows stay in the batch, and do not count
    engine, asked = make(), prompts([5, 3])
    plain = engine.generate(asked, 4, FREE, seed=3)
    assert (engine.prefilled_tokens, engine.decoded_tokens) == (8, 2 * 4 * 11)
    prefixes = [
        [Completion.empty(), group[1].truncated(4), group[1].truncated(4), group[3].truncated(7)] for group in plain
    ]
    engine.generate(asked, 4, FREE, seed=3, prefixes=prefixes)
    assert (engine.prefilled_tokens, engine.decoded_tokens) == (8 + 8 + 2 * (4 + 7), 88 + 2 * (11 + 7 + 7 + 4))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_other_rows_of_the_batch_do_not_change_a_row(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with long prefixes end first; their places may be kept or given up, and batches split anywhere."""
    engine, asked = make(name), prompts([5, 1, 17, 104])  # the last fills the context exactly
    plain = engine.generate(asked, 4, STOPS, seed=5)
    prefixes = begun(engine.generate(asked, 4, STOPS, seed=9), (0, 3, 11, 20))
    expected = tokens(engine.generate(asked, 4, STOPS, seed=5, prefixes=prefixes))
    assert expected != tokens(plain)
    assert 24 in {len(ids) for group in expected for ids in group}
    for module, constant, value in [
        (embedded_engine, "COMPACT_SHARE", 2),
        (embedded_engine, "COMPACT_SHARE", 0),
        (embedded_engine, "CACHE_BYTES", 1 << 17),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(module, constant, value)
            assert tokens(engine.generate(asked, 4, STOPS, seed=5, prefixes=prefixes)) == expected


def test_a_stop_string_may_begin_in_the_prefix() -> None:
    engine, [one] = make(), prompts([5])
    [group] = engine.generate([one], 40, SamplingParams(max_tokens=2, ignore_stop=True), seed=0)
    first, second = max((tuple(c.response_ids.tolist()) for c in group), key=lambda pair: len(PIECES[pair[0]]))
    prefix = next(c.truncated(1) for c in group if c.response_ids.tolist() == [first, second])
    sampling = SamplingParams(max_tokens=9, stop=(PIECES[first][-1] + PIECES[second],))
    [out] = engine.generate([one], 40, sampling, seed=0, prefixes=[[prefix] * 40])
    ended = {c.response_ids[1] == second: (c.finish_reason, c.text, len(c.response_ids)) for c in out}
    assert ended[True] == ("stop", PIECES[first][:-1], 2)
    assert ended[False][2] > 2


def prefix_of(ids: Sequence[int], **changes) -> Completion:
    n = len(ids)
    made = Completion(
        np.array(ids, np.int64), np.zeros(n, np.float32), np.zeros(n, np.int64), "length", "", np.zeros(n, np.float32)
    )
    return replace(made, **changes)


FITTING = Completion.empty()


@pytest.mark.parametrize(
    ("prefixes", "sampling", "word"),
    [
        ([[prefix_of([11])]], FREE, "1 prompts"),
        ([[prefix_of([11])] * 2, [FITTING]], FREE, r"\[1, 2\] samples"),
        ([[FITTING], [prefix_of([11] * 13)]], FREE, "max_tokens"),
        ([[FITTING], [prefix_of([11, 7])]], STOPS, "already complete"),
        ([[FITTING], [prefix_of([11, EOS])]], STOPS, "already complete"),
        ([[FITTING], [prefix_of([PIECES.index("ab")])]], STOPS, "already complete"),
        ([[FITTING], [prefix_of([SIZE])]], FREE, str(SIZE)),
        ([[FITTING], [prefix_of([11, 12], logp_behavior=np.zeros(1, np.float32))]], FREE, "log-probs"),
        ([[FITTING], [prefix_of([11, 12], policy_version=np.zeros(3, np.int64))]], FREE, "versions"),
        ([[FITTING], [prefix_of([11])]], TRUNCATED, "must have sampling masks"),
        ([[FITTING], [prefix_of([11], sampling_mask=(np.array([11]),))]], FREE, "must have sampling masks"),
    ],
)
def test_prefixes_that_do_not_fit_are_named(prefixes: Groups, sampling: SamplingParams, word: str) -> None:
    with pytest.raises(TrimtabError, match=word) as caught:
        make().generate(prompts([4, 6]), 1, sampling, seed=0, prefixes=prefixes)
    assert len(prefixes) == 1 or prefixes[0] != [FITTING] or "'p1', sample 0," in str(caught.value)


def test_a_stop_in_the_prefix_is_nothing_where_stops_are_ignored() -> None:
    [[out], _] = make().generate(
        prompts([4, 6]), 1, FREE, seed=0, prefixes=[[prefix_of([11, EOS])], [Completion.empty()]]
    )
    assert len(out.response_ids) == 12


def test_what_a_prefix_does_not_know_the_response_does_not_claim() -> None:
    [[out], [other]] = make().generate(
        prompts([4, 6]), 1, FREE, seed=0, prefixes=[[prefix_of([11], entropy=None)], [Completion.empty()]]
    )
    assert out.entropy is None
    assert other.entropy is not None


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


def test_requests_that_cannot_be_sampled_are_refused() -> None:
    model = EngineModel(None, frozenset(), vocabulary=3, context=10)
    validate_request(model, [prompt([1, 2])], 1, SamplingParams(max_tokens=8), 0)
    for asked, samples, sampling, seed, message in [
        ([1], 0, SamplingParams(), 0, "samples = 0"),
        ([1], 1, SamplingParams(max_tokens=0), 0, "max_tokens = 0"),
        ([1], 1, SamplingParams(), -1, "seed = -1"),
        ([1], 1, SamplingParams(top_p=0.0), 0, "need temperature >= 0, 0 < top_p <= 1"),
        ([1], 1, SamplingParams(logprobs="raw"), 0, '"processed" log-probs only'),
        ([], 1, SamplingParams(), 0, "has no tokens"),
        ([3], 1, SamplingParams(max_tokens=1), 0, "outside the model's vocabulary of 3"),
        ([1, 2, 0], 1, SamplingParams(max_tokens=8), 0, "context holds 10"),
    ]:
        with pytest.raises(TrimtabError, match=message):
            validate_request(model, [prompt(asked)], samples, sampling, seed)


@pytest.mark.parametrize("temperature", [0.001, 2.5])
def test_temperatures_vllm_would_not_sample_at_are_refused(temperature: float) -> None:
    with pytest.raises(TrimtabError, match="vLLM samples at"):
        validate_vllm_temperature(SamplingParams(temperature=temperature))
    for fine in (0.0, 0.01, 2.0):
        validate_vllm_temperature(SamplingParams(temperature=fine))
