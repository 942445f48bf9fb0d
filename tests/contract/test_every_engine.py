"""What `types.Engine` promises, for every engine: the same tests over all of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.support.engines import After, processed, prompts, tokens
from tests.support.every_engine import CHECKER, ENGINES, STOPS, Subject
from tests.support.turns import FailingTurns, ScriptedTurns

from trimtab.errors import TrimtabError
from trimtab.types import EXTERNAL_VERSION, Completion, FinishReason, SamplingParams, TurnResult

ASKED, SAMPLES = prompts([5, 1, 17]), 3
Groups = list[list[Completion]]


@pytest.fixture(scope="module", params=ENGINES)
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    with request.param(tmp_path_factory.mktemp("engine")) as subject:
        yield subject


@pytest.fixture
def subject(started: Subject) -> Subject:
    """The engine with the weights of seed 0 as version 1."""
    started.publish(0, 1)
    return started


def generate(subject: Subject, sampling: SamplingParams = STOPS, seed: int = 3, **keywords: Any) -> Groups:
    groups = subject.engine.generate(ASKED, SAMPLES, sampling, seed=seed, **keywords)
    assert [len(group) for group in groups] == [SAMPLES] * len(ASKED)
    for one in chain(*groups):
        fields = (one.logp_behavior, one.policy_version, one.sampled, one.entropy)
        assert {len(field) for field in fields if field is not None} == {len(one.response_ids)}
    return groups


def assert_begins(groups: Groups, begun: Groups) -> None:
    """Each response of `begun` is the beginning of the one in `groups`."""
    for one, first in zip(chain(*groups), chain(*begun), strict=True):
        n = len(first.response_ids)
        for name in ("response_ids", "logp_behavior", "policy_version", "sampled"):
            np.testing.assert_array_equal(getattr(one, name)[:n], getattr(first, name))


def assert_same_tokens(subject: Subject, groups: Groups, others: Groups) -> None:
    if subject.exact:
        assert tokens(groups) == tokens(others)


def test_equal_calls_give_equal_tokens(subject: Subject) -> None:
    groups = generate(subject)
    counted = subject.engine.decoded_tokens, subject.engine.prefilled_tokens
    assert min(counted) > 0
    assert_same_tokens(subject, generate(subject), groups)
    assert subject.engine.decoded_tokens > counted[0]
    assert tokens(generate(subject, seed=4)) != tokens(groups)
    assert len({one.response_ids.tobytes() for one in chain(*groups)}) == len(ASKED) * SAMPLES
    for one in chain(*groups):
        assert one.policy_version.tolist() == [1] * len(one.response_ids)
        assert (one.logp_behavior <= 0).all()
        assert np.isfinite(one.logp_behavior).all()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_those_of_the_published_weights(subject: Subject, temperature: float) -> None:
    """After a second publication too, when the prompts may be cached under the first one, and in every turn."""
    asked, sampling = prompts([5, 40]), replace(STOPS, temperature=temperature, max_tokens=20)
    for seed in (0, 1):
        subject.publish(seed, seed)
        groups = subject.engine.generate(asked, SAMPLES, sampling, seed=3, turns=ScriptedTurns(20))
        assert max(int(one.turn[-1]) for one in chain(*groups)) > 0
        for prompt, group in zip(asked, groups, strict=True):
            for one in group:
                exact = processed(subject.model(seed), prompt, one, sampling).numpy()
                chosen = np.take_along_axis(exact, one.response_ids[:, None], 1)[:, 0]
                np.testing.assert_allclose(one.logp_behavior[one.sampled], chosen[one.sampled], atol=2e-4)
                assert one.logp_behavior.flags.writeable


def test_a_prefill_scores_what_was_decoded(subject: Subject) -> None:
    engine: Any = subject.engine
    decoded = list(chain(*generate(subject)))
    rows = engine.prefill_logps([prompt for prompt in ASKED for _ in range(SAMPLES)], decoded)
    for one, row in zip(decoded, rows, strict=True):
        assert row.dtype == np.float32
        np.testing.assert_allclose(row, one.logp_behavior, rtol=0, atol=1e-4)  # the rounding of float32; logits of 20
    subject.publish(1, 2)
    others = engine.prefill_logps([prompt for prompt in ASKED for _ in range(SAMPLES)], decoded)
    assert min(np.abs(a - b).max() for a, b in zip(rows, others, strict=True)) > 1e-2


def test_a_response_ends_at_its_first_stop_or_at_its_last_token(subject: Subject) -> None:
    sampling = SamplingParams(max_tokens=9, stop=STOPS.stop, stop_ids=STOPS.stop_ids)
    groups = generate(subject, sampling)
    for one in chain(*groups):
        ids = one.response_ids.tolist()
        assert CHECKER.end(ids) == (len(ids) if one.finish_reason == "stop" else None)
        assert one.finish_reason == "stop" or len(ids) == 9
        assert one.text == CHECKER.text(ids)
    assert {one.finish_reason for one in chain(*groups)} == {"stop", "length"}


def test_a_prefix_is_kept_and_what_follows_is_of_the_new_weights(subject: Subject) -> None:
    whole = generate(subject)
    begun = [[one.truncated(4) for one in group] for group in whole]
    subject.publish(1, 7)
    groups = generate(subject, prefixes=begun)
    assert_begins(groups, begun)
    for one, first in zip(chain(*groups), chain(*begun), strict=True):
        n = len(first.response_ids)
        assert one.policy_version.tolist() == [1] * n + [7] * (len(one.response_ids) - n)
    again = generate(subject, prefixes=whole)
    assert tokens(again) == tokens(whole)  # complete responses
    assert [(one.finish_reason, one.text) for one in chain(*again)] == [
        (one.finish_reason, one.text) for one in chain(*whole)
    ]
    empty = [[Completion.empty()] * SAMPLES for _ in ASKED]
    assert_same_tokens(subject, generate(subject, prefixes=empty), generate(subject))


def test_an_interrupted_call_goes_on_until_it_is_complete(subject: Subject) -> None:
    expected, groups = generate(subject), None
    for checks in range(200):
        before, groups = groups, generate(subject, prefixes=groups, abort=After(checks))
        assert before is None or assert_begins(groups, before) is None
        if all(one.finish_reason != "abort" for one in chain(*groups)):
            break
    assert groups is not None
    assert {one.finish_reason for one in chain(*groups)} <= {"stop", "length"}
    assert_same_tokens(subject, groups, expected)


def test_bad_weights_are_refused_and_change_nothing(subject: Subject) -> None:
    before = generate(subject)
    named = dict(subject.model(1).named_parameters())
    name = next(name for name in named if "norm" in name or "ln_" in name)
    missing = {key: weight for key, weight in named.items() if key != name}
    infinite = {**named, name: named[name].detach() + float("inf")}
    for weights, words in ((missing, "missing"), (infinite, "non-finite")):
        with pytest.raises(TrimtabError, match=words):
            subject.engine.update_weights(weights.items(), 2)
    assert subject.engine.policy_version == 1
    assert_same_tokens(subject, generate(subject), before)


def test_weights_in_use_can_be_published_again(subject: Subject) -> None:
    before, saved = generate(subject), {name: weight.clone() for name, weight in subject.engine.named_weights()}
    subject.publish(1, 2)
    assert tokens(generate(subject)) != tokens(before)
    subject.engine.update_weights(saved.items(), 3, as_is=True)
    subject.engine.restart()  # it is alive: nothing happens
    assert subject.engine.policy_version == 3
    assert_same_tokens(subject, generate(subject), before)


class Recorded(ScriptedTurns):
    """Keeps every turn that was submitted, and its result."""

    def __init__(self, **options: Any) -> None:
        super().__init__(STOPS.max_tokens, **options)
        self.turns: dict[tuple[int, int], list[tuple[Completion, TurnResult]]] = {}

    def submit(self, prompt: int, sample: int, completion: Completion) -> None:
        super().submit(prompt, sample, completion)
        self.turns.setdefault((prompt, sample), []).append((completion, self.answer(completion)))

    def released(self) -> Recorded:
        """Results are known from now on."""
        self._late = {}
        return self


def test_a_turn_begins_with_all_ids_of_the_turn_before(subject: Subject) -> None:
    handler = Recorded(late={1: 3})
    groups = generate(subject, turns=handler)
    assert max(int(one.turn[-1]) for one in chain(*groups)) == 2
    for p, group in enumerate(groups):
        for s, one in enumerate(group):
            ids: list[int] = []
            sampled: list[bool] = []
            for turn, result in handler.turns.get((p, s), []):
                assert turn.response_ids.tolist()[: len(ids)] == ids
                assert CHECKER.end(turn.response_ids.tolist(), len(ids)) == len(turn.response_ids)
                sampled += [True] * (len(turn.response_ids) - len(ids)) + [False] * len(result.ids)
                ids = [*turn.response_ids.tolist(), *result.ids.tolist()]
            assert one.response_ids.tolist()[: len(ids)] == ids
            assert one.sampled.tolist() == sampled + [True] * (len(one.response_ids) - len(ids))
            assert np.isnan(one.logp_behavior).tolist() == (~one.sampled).tolist()
            assert one.policy_version.tolist() == np.where(one.sampled, 1, EXTERNAL_VERSION).tolist()
            last = one.response_ids[(one.turn == one.turn[-1]) & one.sampled].tolist()
            assert one.text == CHECKER.text(last)
            assert one.finish_reason == ("stop" if CHECKER.end(last) else "length")


class FirstEndsAtOnce(ScriptedTurns):
    """Ends the responses to prompt 0 when their first turn is submitted; no result follows."""

    def submit(self, prompt: int, sample: int, completion: Completion) -> FinishReason | None:
        super().submit(prompt, sample, completion)
        return "stop" if prompt == 0 else None

    def result(self, prompt: int, sample: int, timeout: float) -> TurnResult | None:
        assert prompt > 0
        return super().result(prompt, sample, timeout)


def test_a_turn_that_ends_its_response_needs_no_result(subject: Subject) -> None:
    single = generate(subject)
    groups = generate(subject, turns=FirstEndsAtOnce(STOPS.max_tokens))
    assert {one.loss_mask is None for one in groups[0]} == {True}
    assert "stop" in {one.finish_reason for one in groups[0]}
    assert_same_tokens(subject, groups[:1], single[:1])
    assert max(int(one.turn[-1]) for one in chain(*groups[1:])) == 2


def test_a_turn_without_a_stop_is_the_last_one(subject: Subject) -> None:
    groups = generate(subject, turns=Recorded(max_turn_tokens=6))
    for one in chain(*groups):
        lengths = np.bincount(one.turn[one.sampled])
        assert max(lengths) <= 6
        assert one.finish_reason == "stop" or lengths[-1] == 6 or len(one.response_ids) == STOPS.max_tokens
    assert "length" in {one.finish_reason for one in chain(*groups)}


def test_turns_interrupted_while_tools_run_go_on_with_their_results(subject: Subject) -> None:
    handler = Recorded(late=dict.fromkeys(range(len(ASKED)), 10**9))
    begun = generate(subject, turns=handler, abort=SimpleNamespace(is_set=lambda: len(handler.turns) >= 4))
    assert "abort" in {one.finish_reason for one in chain(*begun)}
    waited = {key: turns[0][0].response_ids for key, turns in handler.turns.items()}
    subject.publish(1, 9)
    groups = generate(subject, prefixes=begun, turns=handler.released())
    assert_begins(groups, begun)
    for (p, s), ids in waited.items():
        assert groups[p][s].response_ids.tolist()[: len(ids)] == ids.tolist()
        assert set(groups[p][s].policy_version[: len(ids)].tolist()) == {1}
    versions = {version for one in chain(*groups) for version in one.policy_version.tolist()}
    assert versions == {1, 9, EXTERNAL_VERSION}
    assert {one.finish_reason for one in chain(*groups)} <= {"stop", "length"}


def test_an_error_of_the_handler_is_raised_and_the_engine_lives_on(subject: Subject) -> None:
    before = generate(subject)
    with pytest.raises(ZeroDivisionError):
        generate(subject, turns=FailingTurns(STOPS.max_tokens))
    assert_same_tokens(subject, generate(subject), before)
    assert max(int(one.turn[-1]) for one in chain(*generate(subject, turns=Recorded()))) == 2
