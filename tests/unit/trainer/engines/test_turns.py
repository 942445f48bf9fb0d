"""Multi-turn responses: every turn continues the response so far exactly as a call of its own would."""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch
from tests.support.engines import EOS, After, forward_logps, prompts, tiny, tokenizer
from tests.support.turns import ScriptedTurns

from trimtab.errors import TrimtabError
from trimtab.trainer.engines import turn_exchange
from trimtab.trainer.engines.embedded import embedded_engine, shared_prompt_decoder
from trimtab.trainer.engines.embedded.embedded_engine import EmbeddedEngine
from trimtab.trainer.models.invariant import make_invariant
from trimtab.types import EXTERNAL_VERSION, Completion, FinishReason, Prompt, SamplingParams, TurnResult

LENGTHS = [5, 1, 17, 30]
STOPS = SamplingParams(max_tokens=70, stop=("a", "b", "c"), stop_ids=(7, 8, 20, 21, 22, 23))
TRUNCATED = replace(STOPS, temperature=0.7, top_k=20, top_p=0.8)
Groups = list[list[Completion]]


def make(name: str = "llama", *, invariant: bool = False) -> EmbeddedEngine:
    """In float64 unless invariant: where two sums differ in rounding, a draw next to a bound takes another token."""
    model = tiny(name)
    if invariant:
        make_invariant(model)
    if invariant or name == "qwen3-moe":  # torch multiplies its experts in float32 at most
        return EmbeddedEngine(model, tokenizer(), torch.float32)
    return EmbeddedEngine(model.double(), tokenizer(), torch.float64)


def turn_by_turn(engine: EmbeddedEngine, asked: list[Prompt], samples: int, sampling: SamplingParams) -> Groups:
    """The same responses by one call for each turn: observations are part of the prefixes."""
    handler = ScriptedTurns(sampling.max_tokens)
    groups: Groups = [[Completion.empty()] * samples for _ in asked]
    done: dict[tuple[int, int], Completion] = {}
    while len(done) < len(asked) * samples:
        # A turn is sampled by a call of one prompt and sample, whose stops inside earlier turns do not count.
        for p in range(len(asked)):
            for s in range(samples):
                if (p, s) in done:
                    continue
                one = groups[p][s]
                grown = one_turn(engine, asked, samples, sampling, p, s, one)
                result = handler.answer(grown)
                if grown.finish_reason == "length" or result.finish_reason is not None:
                    done[p, s] = grown
                    continue
                groups[p][s] = observed(grown, result)
    return [[done[p, s] for s in range(samples)] for p in range(len(asked))]


class EndsAtOnce:
    """Ends every turn that is submitted."""

    max_turn_tokens = 1000

    def submit(self, prompt: int, sample: int, completion: Completion) -> FinishReason | None:
        del prompt, sample, completion
        return "stop"

    def result(self, prompt: int, sample: int, timeout: float) -> TurnResult:
        raise AssertionError(prompt, sample, timeout)


def one_turn(engine, asked, samples, sampling, p, s, begun) -> Completion:
    whole = replace(begun, finish_reason="abort")
    finished = replace(Completion.empty(), response_ids=np.array([EOS]), logp_behavior=np.zeros(1, np.float32))
    finished = replace(finished, policy_version=np.zeros(1, np.int64), finish_reason="stop")
    if sampling.truncated:
        finished = replace(finished, sampling_mask=(np.array([EOS]),))
    prefixes = [[finished] * samples for _ in asked]
    prefixes[p][s] = whole
    return engine.generate(asked, samples, sampling, seed=3, prefixes=prefixes, turns=EndsAtOnce())[p][s]


def observed(one: Completion, result: TurnResult) -> Completion:
    n = len(result.ids)
    nan = np.full(n, np.nan, np.float32)
    return replace(
        one,
        response_ids=np.concatenate([one.response_ids, result.ids]),
        logp_behavior=np.concatenate([one.logp_behavior, nan]),
        entropy=np.concatenate([one.entropy, nan]),
        policy_version=np.concatenate([one.policy_version, np.full(n, EXTERNAL_VERSION)]),
        sampling_mask=None if one.sampling_mask is None else one.sampling_mask + tuple(result.ids[:, None]),
        loss_mask=np.concatenate([one.sampled, np.zeros(n, bool)]),
    )


def assert_close(expected: Groups, got: Groups) -> None:
    for a, b in zip(chain(*expected), chain(*got), strict=True):
        assert a.response_ids.tolist() == b.response_ids.tolist()
        assert (a.finish_reason, a.text) == (b.finish_reason, b.text)
        assert a.sampled.tolist() == b.sampled.tolist()
        assert a.policy_version.tolist() == b.policy_version.tolist()
        for x, y in zip(a.sampling_mask or (), b.sampling_mask or (), strict=True):
            assert x.tolist() == y.tolist()
        np.testing.assert_allclose(a.logp_behavior, b.logp_behavior, atol=1e-4)
        np.testing.assert_allclose(a.entropy, b.entropy, atol=1e-4)


@pytest.mark.e2e  # several seconds
@pytest.mark.parametrize(
    ("name", "sampling"),
    [("llama", STOPS), ("llama", TRUNCATED), ("mistral-window", STOPS), ("qwen3-moe", STOPS), ("gpt2", TRUNCATED)],
)
def test_turns_continue_the_response_so_far(name: str, sampling: SamplingParams) -> None:
    engine, asked = make(name), prompts(LENGTHS)
    got = engine.generate(asked, 3, sampling, seed=3, turns=ScriptedTurns(70))
    assert max(int(one.turn[-1]) for one in chain(*got)) == 2
    assert len({len(one.response_ids) for one in chain(*got)}) > 3
    assert_close(turn_by_turn(make(name), asked, 3, sampling), got)


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "mistral-window"])
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
        assert_close(expected, got)
        if invariant:
            for a, b in zip(chain(*expected), chain(*got), strict=True):
                assert np.array_equal(a.logp_behavior, b.logp_behavior, equal_nan=True)


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
    for a, b in zip(chain(*one), chain(*two), strict=True):
        assert np.array_equal(a.logp_behavior, b.logp_behavior, equal_nan=True)


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
        assert groups is not None
        assert aborted
        assert_close(expected, groups)
        for a, b in zip(chain(*expected), chain(*groups), strict=True):
            assert (a.routed_experts is None) == (not routes)
            if routes:
                assert np.array_equal(a.routed_experts, b.routed_experts)


def test_an_observation_that_does_not_fit_is_an_error() -> None:
    class Long(EndsAtOnce):
        def submit(self, prompt: int, sample: int, completion: Completion) -> FinishReason | None:
            del prompt, sample, completion

        def result(self, prompt: int, sample: int, timeout: float) -> TurnResult:
            del prompt, sample, timeout
            return TurnResult(np.arange(2, 72), None)

    with pytest.raises((ValueError, TrimtabError), match="70"):
        make().generate(prompts([3]), 1, STOPS, seed=3, turns=Long())
