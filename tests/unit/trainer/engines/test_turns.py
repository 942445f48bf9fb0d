"""Multi-turn responses: log-probs of one forward pass over all turns, and the same tokens whenever results come."""

from __future__ import annotations

import threading
from itertools import chain

import numpy as np
import pytest
import torch
from tests.support.engines import After, assert_same, forward_logps, prompts, tiny, tokenizer
from tests.support.turns import ScriptedTurns

from trimtab.errors import TrimtabError
from trimtab.trainer.engines import turn_exchange
from trimtab.trainer.engines.embedded import embedded_engine, shared_prompt_decoder
from trimtab.trainer.engines.embedded.embedded_engine import EmbeddedEngine
from trimtab.trainer.models.invariant import make_invariant
from trimtab.types import EXTERNAL_VERSION, Completion, SamplingParams, TurnResult

LENGTHS = [5, 1, 17, 30]
STOPS = SamplingParams(max_tokens=70, stop=("a", "b", "c"), stop_ids=(7, 8, 20, 21, 22, 23))


def make(name: str = "llama", *, invariant: bool = False) -> EmbeddedEngine:
    """In float64 unless invariant: where two sums differ in rounding, a draw next to a bound takes another token."""
    model = tiny(name)
    if invariant:
        make_invariant(model)
    if invariant or name == "qwen3-moe":  # torch multiplies its experts in float32 at most
        return EmbeddedEngine(model, tokenizer(), torch.float32)
    return EmbeddedEngine(model.double(), tokenizer(), torch.float64)


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen3-moe", "gpt2"])
def test_log_probs_are_those_of_one_forward_pass_and_absent_at_observations(name: str) -> None:
    model, asked = tiny(name), prompts(LENGTHS)
    got = make(name).generate(asked, 3, STOPS, seed=3, turns=ScriptedTurns(70))
    observations = 0
    for one, logp in zip(chain(*got), forward_logps(model, asked, got), strict=True):
        sampled = one.sampled
        observations += int((~sampled).sum())
        np.testing.assert_allclose(one.logp_behavior[sampled], logp[sampled], atol=1e-4)
        assert np.isnan(one.logp_behavior[~sampled]).all()
        assert np.isnan(one.entropy[~sampled]).all()
        assert ((one.policy_version == EXTERNAL_VERSION) == ~sampled).all()
    assert observations > 20


@pytest.mark.e2e  # several seconds
@pytest.mark.parametrize(
    ("name", "invariant"), [("llama", False), ("gpt2", False), ("mistral-window", False), ("llama", True)]
)
def test_late_results_change_no_token(name: str, invariant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that wait long are shifted, and their batch needs positions beyond its first allocation."""
    engine, asked = make(name, invariant=invariant), prompts(LENGTHS)
    expected = engine.generate(asked, 3, STOPS, seed=3, turns=ScriptedTurns(70))
    monkeypatch.setattr(turn_exchange, "MAX_WAIT", 0.0)
    monkeypatch.setattr(turn_exchange, "POLL_INTERVAL", 0.0)
    monkeypatch.setattr(shared_prompt_decoder, "BLOCK", 4)
    for share, late in ((0, {2: 45, 3: 3}), (2, {0: 60, 1: 1, 2: 25})):
        monkeypatch.setattr(embedded_engine, "COMPACT_SHARE", share)
        got = engine.generate(asked, 3, STOPS, seed=3, turns=ScriptedTurns(70, late=late))
        assert_same(got, expected, atol=None if invariant else 1e-4)


def test_results_in_time_repeat_bit_for_bit_whatever_the_clock_does() -> None:
    class Threads(ScriptedTurns):
        """Results come from threads, after up to 20 ms."""

        def __init__(self, seed: int) -> None:
            super().__init__(70)
            self._rng, self._events = np.random.default_rng(seed), {}

        def submit(self, prompt: int, sample: int, completion: Completion) -> None:
            super().submit(prompt, sample, completion)
            self._events[prompt, sample] = event = threading.Event()
            threading.Timer(self._rng.uniform(0, 0.02), event.set).start()

        def result(self, prompt: int, sample: int, timeout: float) -> TurnResult | None:
            if self._events[prompt, sample].wait(timeout):
                return super().result(prompt, sample, timeout)
            return None

    engine, asked = make(), prompts(LENGTHS)
    one, two = (engine.generate(asked, 3, STOPS, seed=3, turns=Threads(seed)) for seed in (0, 1))
    assert_same(one, two)


def test_nothing_is_prefilled_twice_and_every_token_is_run_once() -> None:
    engine, asked = make(), prompts(LENGTHS)
    got = engine.generate(asked, 3, STOPS, seed=3, turns=ScriptedTurns(70))
    assert engine.prefilled_tokens == sum(LENGTHS)
    assert engine.decoded_tokens == sum(len(one.response_ids) - 1 for one in chain(*got))


@pytest.mark.e2e  # several seconds
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3-moe"])
@pytest.mark.parametrize("late", [None, {0: 1000, 2: 4}])
def test_interrupted_anywhere_it_ends_with_the_same_tokens(name: str, late: dict[int, int] | None) -> None:
    """An abort may fall into a turn, into a wait, or into an observation."""
    routes = name == "qwen3-moe"
    engine = EmbeddedEngine(tiny(name), tokenizer(), torch.float32, routes=routes)
    asked = prompts([5, 1, 17])
    expected = engine.generate(asked, 2, STOPS, seed=3, turns=ScriptedTurns(70))
    # Seven tokens apart, from seven beginnings: anywhere.
    for first in range(0, 70, 11) if name == "llama" else (0, 33):
        checks = first
        handler, groups, aborted = ScriptedTurns(70, late=late), None, 0
        for _ in range(200):
            groups = engine.generate(asked, 2, STOPS, seed=3, prefixes=groups, turns=handler, abort=After(checks))
            for one in chain(*groups):
                assert len(one.sampled) == len(one.logp_behavior) == len(one.policy_version)
            if not any(one.finish_reason == "abort" for one in chain(*groups)):
                break
            aborted += 1
            handler._late = {}
            checks = checks + 7
        assert aborted
        assert_same(groups, expected, atol=1e-4)
        for a, b in zip(chain(*expected), chain(*groups), strict=True):
            assert (a.routed_experts is None) == (not routes)
            if routes:
                assert np.array_equal(a.routed_experts, b.routed_experts)


def test_an_observation_that_does_not_fit_is_an_error() -> None:
    class Long(ScriptedTurns):
        def answer(self, completion: Completion) -> TurnResult:
            del completion
            return TurnResult(np.arange(2, 72), None)

    with pytest.raises((ValueError, TrimtabError), match="70"):
        make().generate(prompts([3]), 1, STOPS, seed=3, turns=Long(70))
