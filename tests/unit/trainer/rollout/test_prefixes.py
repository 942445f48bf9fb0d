"""Prefixes of older policies: where responses are cut, and their cycle, on the untrained laboratory model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.engines import assert_same, tokens

from trimtab.errors import TrimtabError
from trimtab.trainer import tasks
from trimtab.trainer.config import Config, PrefixConfig
from trimtab.trainer.engines.embedded.embedded_engine import EmbeddedEngine
from trimtab.trainer.models import laboratory
from trimtab.trainer.rollout.prefixes import PrefixedSampler, before_high_entropy, cut, prefix_tokens
from trimtab.trainer.rollout.prompts import PromptStream
from trimtab.trainer.seeds import derive
from trimtab.types import Completion, FinishReason, Prompt, SamplingParams


def response(n: int, finish: FinishReason = "stop", entropy: list[float] | None = None) -> Completion:
    return Completion(
        response_ids=np.arange(10, 10 + n),
        logp_behavior=-np.arange(n, dtype=np.float32),
        policy_version=np.full(n, 3),
        finish_reason=finish,
        text="text",
        entropy=None if entropy is None else np.array(entropy, np.float32),
        sampling_mask=tuple(np.array([i]) for i in range(n)),
    )


@pytest.mark.parametrize(
    ("ratio", "length", "kept"),
    [(0.5, 11, 5), (0.3, 10, 3), (0.29, 100, 29), (0.7, 10, 7), (0.0, 9, 0), (0.3, 10.99, 3), (0.9, 1, 0)],
)
def test_the_share_of_a_length_is_its_floor(ratio: float, length: float, kept: int) -> None:
    assert prefix_tokens(ratio, length) == kept


def test_length_keeps_a_share_and_never_the_stop() -> None:
    ten = response(10)
    assert cut(PrefixConfig(ratio=0.3), ten, 0.9).response_ids.tolist() == [10, 11, 12]
    assert cut(PrefixConfig(ratio=0.99), response(3), 0.0).response_ids.tolist() == [10, 11]
    assert len(cut(PrefixConfig(), response(1), 0.0).response_ids) == 0
    assert len(cut(PrefixConfig(), response(0, "abort"), 0.0).response_ids) == 0


@given(n=st.integers(1, 40), kept=st.integers(0, 60), finish=st.sampled_from(["stop", "length"]))
def test_a_cut_keeps_every_field_in_step_and_drops_the_ending(n: int, kept: int, finish: FinishReason) -> None:
    whole = response(n, finish, entropy=list(range(n)))
    prefix = whole.truncated(kept)
    k = min(kept, n - 1 if finish == "stop" else n)
    assert prefix.response_ids.tolist() == list(range(10, 10 + k))
    assert prefix.logp_behavior.tolist() == [-i for i in range(k)]
    assert prefix.policy_version.tolist() == [3] * k
    assert prefix.entropy.tolist() == list(range(k))
    assert [ids.tolist() for ids in prefix.sampling_mask] == [[i] for i in range(k)]
    assert (prefix.finish_reason, prefix.text) == ("length", "")


def test_entropy_cuts_before_one_of_the_highest_positions() -> None:
    entropy = np.array([0.1, 2.0, 0.3, 5.0, 2.0, 0.0], np.float32)
    # In descending order: positions 3, 1, 4 (a tie keeps the order of the text), 2, 0, 5.
    assert [before_high_entropy(entropy, u, 3) for u in (0.0, 0.34, 0.67, 0.999)] == [3, 1, 4, 4]
    assert before_high_entropy(entropy, 0.999, 32) == 5  # fewer positions than `top`: all of them
    assert before_high_entropy(np.empty(0, np.float32), 0.5, 3) == 0
    prefix = cut(PrefixConfig(rule="entropy", top=1), response(6, entropy=entropy.tolist()), 0.7)
    assert prefix.response_ids.tolist() == [10, 11, 12]  # the token at position 3 is sampled again


def test_entropy_chooses_uniformly() -> None:
    entropy = np.random.default_rng(0).random(40).astype(np.float32)
    draws = np.random.default_rng(1).random(4000)
    counts = np.bincount([before_high_entropy(entropy, u, 8) for u in draws], minlength=40)
    highest = np.sort(np.argsort(entropy)[-8:])
    assert np.flatnonzero(counts).tolist() == highest.tolist()
    assert np.abs(counts[highest] - 500).max() < 4 * np.sqrt(500)


def test_entropy_without_entropies_is_named() -> None:
    with pytest.raises(TrimtabError, match='does not report; use "length"'):
        cut(PrefixConfig(rule="entropy"), response(4), 0.5)


SAMPLING = SamplingParams(max_tokens=12, stop=(".",))
TASK = tasks.build("sort")
FIRST_CYCLE = derive(7, "prefix", 0)


@dataclass
class Pool(PrefixedSampler):
    """With an engine of its own."""

    engine: EmbeddedEngine = field(kw_only=True)

    def fill(self, prompts: Sequence[Prompt]) -> None:
        self.refill(prompts, self.engine.generate)


def make(samples: int = 4, sampling: SamplingParams = SAMPLING, **config: Any) -> Pool:
    model, tokenizer = laboratory.build(0)
    trainer = Config().trainer.model_copy(update={"samples": samples})
    recipe = Config(seed=7, prefix=PrefixConfig(**config), trainer=trainer)
    engine = EmbeddedEngine(model, tokenizer, torch.float32)
    return Pool(recipe, PromptStream(TASK, tokenizer, seed=7), sampling, engine=engine)


def ask(count: int) -> list[Prompt]:
    return PromptStream(TASK, laboratory.build(0)[1], seed=7).at(0, count)


def lengths(prefixes: list[list[Completion]]) -> list[list[int]]:
    return [[len(prefix.response_ids) for prefix in group] for group in prefixes]


def test_a_cycle_is_one_refill_and_then_its_batches() -> None:
    pool, prompts = make(refresh=3, ratio=0.3), ask(4)
    assert (pool.batches, pool.starts_cycle) == (2, True)
    pool.observe([10, 11, 12])
    pool.fill(prompts)
    assert not pool.starts_cycle
    first, prefixes = pool.take(2)
    assert first == prompts[:2]
    assert all(k == 3 or k < 3 for group in lengths(prefixes) for k in group)
    assert not pool.starts_cycle
    second, _ = pool.take(2)
    assert second == prompts[2:]
    assert pool.starts_cycle
    with pytest.raises(ValueError, match="0 are waiting"):
        pool.take(1)


def test_a_ratio_of_zero_draws_nothing_where_length_cuts() -> None:
    assert [make(refresh=3, ratio=0.0, rule=rule).batches for rule in ("length", "entropy")] == [0, 2]


def test_prefixes_are_the_historical_policys_own_tokens_and_hold_no_stop() -> None:
    """No more than the budget is sampled, and a continuation under unchanged weights is what would have been."""
    pool, prompts = make(samples=8, refresh=2, ratio=0.5), ask(6)
    pool.observe([12, 12])
    before = pool.engine.decoded_tokens
    pool.fill(prompts)
    assert pool.engine.decoded_tokens - before <= 6 * 8 * 5  # of a budget of 6 five are fed, the sixth is only drawn
    _, prefixes = pool.take(6)
    stop = laboratory.ALPHABET.index(laboratory.END)
    cut_at_stop = [k for group in lengths(prefixes) for k in group if k < 6]
    assert cut_at_stop
    assert max(k for group in lengths(prefixes) for k in group) == 6
    assert not any(stop in prefix.response_ids for group in prefixes for prefix in group)
    pool.engine.generate(prompts, 8, SAMPLING, seed=1, prefixes=prefixes)  # refused if one were complete


def test_the_budget_follows_the_responses_of_the_last_cycle() -> None:
    pool, prompts = make(refresh=2, ratio=0.5), ask(2)
    for lengths_seen, budget in (([4, 5], 2), ([12, 9, 11], 5), ([1, 2], 0)):
        pool.observe(lengths_seen)
        pool.fill(prompts)
        _, prefixes = pool.take(2)
        assert max(max(group) for group in lengths(prefixes)) == budget
    with pytest.raises(ValueError, match="no response was observed"):
        pool.fill(prompts)


def test_draws_differ_from_cycle_to_cycle_and_repeat_with_the_seed() -> None:
    def cycles() -> list[list[list[list[int]]]]:
        pool, result = make(refresh=2, ratio=0.5), []
        for _ in range(2):
            pool.observe([12])
            pool.fill(ask(3))
            result.append(tokens(pool.take(3)[1]))
        return result

    first, second = cycles()
    assert first != second
    assert [first, second] == cycles()


def test_shared_prefixes_are_drawn_once_and_given_to_neighbors() -> None:
    alone, shared = make(samples=4, refresh=2, ratio=0.5), make(samples=4, refresh=2, ratio=0.5, share=2)
    for pool in (alone, shared):
        pool.observe([12])
        pool.fill(ask(3))
    assert shared.engine.decoded_tokens < 0.6 * alone.engine.decoded_tokens
    _, prefixes = shared.take(3)
    for group in prefixes:
        assert group[0] is group[1]
        assert group[2] is group[3]
        assert group[0] is not group[2]


def test_whole_responses_are_cut_by_their_own_length() -> None:
    pool, prompts = make(samples=8, refresh=2, ratio=0.5, whole=True), ask(6)
    pool.fill(prompts)  # needs no mean
    whole = pool.engine.generate(prompts, 8, SAMPLING, seed=FIRST_CYCLE)
    _, prefixes = pool.take(6)
    assert lengths(prefixes) == [[len(c.response_ids) // 2 for c in group] for group in whole]
    assert len({k for group in lengths(prefixes) for k in group}) > 2
    for group, wholes in zip(prefixes, whole, strict=True):
        for prefix, completion in zip(group, wholes, strict=True):
            k = len(prefix.response_ids)
            assert np.array_equal(prefix.response_ids, completion.response_ids[:k])
            assert np.array_equal(prefix.logp_behavior, completion.logp_behavior[:k])


def test_entropy_cuts_where_the_policy_was_least_certain() -> None:
    pool, prompts = make(samples=8, refresh=2, rule="entropy", top=1), ask(6)
    pool.fill(prompts)
    whole = pool.engine.generate(prompts, 8, SAMPLING, seed=FIRST_CYCLE)
    _, prefixes = pool.take(6)
    assert lengths(prefixes) == [[int(np.argmax(c.entropy)) for c in group] for group in whole]


@pytest.mark.parametrize(
    ("sampling", "length_seen"),
    [(SAMPLING, 12), (replace(SAMPLING, top_k=5), 12), (SAMPLING, 1)],
    ids=["full", "top-k", "zero"],
)
def test_a_restored_pool_goes_on_as_the_saved_one(sampling: SamplingParams, length_seen: int) -> None:
    pool, prompts = make(sampling=sampling, refresh=4, ratio=0.5, share=2), ask(6)
    pool.observe([length_seen])
    pool.fill(prompts)
    pool.take(2)
    pool.observe([9, 10])
    meta, files = pool.state()
    assert meta["prefixes"]["waiting"] == 4
    other = make(sampling=sampling, refresh=4, ratio=0.5, share=2)
    other.restore({**meta, "drawn": 2}, files)
    assert other.state()[0] == meta
    (asked, expected), (others, actual) = pool.take(4), other.take(4)
    assert [one.problem for one in others] == [one.problem for one in asked]  # the stream's own, with all it carries
    assert_same(actual, expected)
    for either in (pool, other):
        either.fill(prompts)
    assert tokens(pool.take(6)[1]) == tokens(other.take(6)[1])


def test_an_empty_pool_survives_a_checkpoint() -> None:
    pool, other = make(refresh=2), make(refresh=2)
    pool.observe([5])
    meta, files = pool.state()
    other.restore({**meta, "drawn": 0}, files)
    assert other.starts_cycle
    assert other.state()[0] == pool.state()[0]


def test_prefixes_of_another_task_are_refused() -> None:
    pool = make(refresh=2, ratio=0.5)
    pool.observe([12])
    pool.fill(pool.stream.at(0, 4))
    meta, files = pool.state()
    for changed in ({"drawn": 1}, {"drawn": 0, "prefixes": {**meta["prefixes"], "waiting": 3}}):
        with pytest.raises(TrimtabError, match="the task does not ask now"):
            make(refresh=2).restore({**meta, **changed}, files)
