"""The closed form of a step against hand-made cases and against the real schedule on a virtual clock."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.support.simulated_schedule import simulate

from trimtab.trainer.planning.estimates import Phases, steady_cycle

# Tenths of a second: sums of them are far enough apart for two ways of adding up to agree on what came first.
seconds = st.integers(1, 40).map(lambda tenths: tenths / 10)
phases = st.builds(Phases, generate=seconds, train=seconds, score=seconds, publish=seconds, load=seconds)


def test_without_generating_ahead_the_phases_follow_one_another() -> None:
    cycle = steady_cycle(Phases(generate=3, train=2, score=1, publish=0.5, load=0.25), ahead=0)
    assert (cycle.seconds, cycle.lag_mean, cycle.lag_max) == (6.75, 0, 0)


def test_generating_one_step_ahead_hides_the_shorter_phase() -> None:
    cycle = steady_cycle(Phases(generate=3, train=2), ahead=1)
    assert (cycle.seconds, cycle.engines, cycle.lag_mean, cycle.lag_max) == (3, 1.0, 1.0, 1)
    assert cycle.trainer == pytest.approx(2 / 3)


def test_three_equal_phases_need_two_steps_ahead() -> None:
    equal = Phases(generate=1, score=1, train=1)
    assert [steady_cycle(equal, ahead).seconds for ahead in (0, 1, 2, 3)] == [3, 1.5, 1, 1]
    assert equal.sufficient_ahead == 2


def test_an_idle_engine_runs_as_far_ahead_as_it_may() -> None:
    """The trainer is the slow side: batches wait, and grow as old as the bound allows."""
    assert [steady_cycle(Phases(generate=1, train=4), ahead).lag_mean for ahead in (1, 2, 5)] == [1, 2, 5]
    # The engines are the slow side: whatever the bound, one batch is being written.
    assert [steady_cycle(Phases(generate=4, train=1), ahead).lag_mean for ahead in (1, 2, 5)] == [1, 1, 1]


def is_tied(phases: Phases, ahead: int) -> bool:
    """Whether weights are published at the very moment an engine asks for them: rounding decides which it gets."""
    early, late = (replace(phases, load=phases.load + change) for change in (-1e-6, 1e-6))
    return steady_cycle(early, ahead).lag_mean != steady_cycle(late, ahead).lag_mean


def test_a_tie_is_noticed() -> None:
    # Engines take 3.6 s, and so do scoring and trainer together.
    assert is_tied(Phases(generate=0.1, train=0.1, score=0.2, publish=3.3, load=3.5), 2)
    assert not is_tied(Phases(generate=0.1, train=0.1, score=0.2, publish=3.3, load=3.4), 2)


@settings(max_examples=40, deadline=None)
@given(phases=phases, ahead=st.integers(0, 4), updates=st.integers(1, 3))
def test_the_arithmetic_is_that_of_the_loop(phases: Phases, ahead: int, updates: int) -> None:
    assume(not is_tied(phases, ahead))
    expected = steady_cycle(phases, ahead)
    period, mean, most = simulate(phases, ahead, updates=updates, steps=900)
    assert period == pytest.approx(expected.seconds, rel=0.02)  # a cycle of several steps may be cut at both ends
    assert most == expected.lag_max * updates
    assert mean == pytest.approx(expected.lag_mean * updates, abs=0.1)


@settings(max_examples=30, deadline=None)
@given(phases=phases)
def test_the_sufficient_number_of_steps_ahead_is_the_smallest(phases: Phases) -> None:
    ahead = phases.sufficient_ahead
    assert steady_cycle(phases, ahead).seconds == pytest.approx(phases.ideal)
    assert ahead == 0 or steady_cycle(phases, ahead - 1).seconds > phases.ideal


@settings(max_examples=30, deadline=None)
@given(phases=phases, ahead=st.integers(1, 3), engines=st.sampled_from([2, 4]))
def test_several_equal_engines_are_one(phases: Phases, ahead: int, engines: int) -> None:
    period, _, most = simulate(phases, ahead, engines=engines)
    # An engine that ends first may begin the next batch before the others: never slower, never older than the bound.
    assert period <= steady_cycle(phases, ahead).seconds * 1.02
    assert period >= phases.ideal * 0.98
    assert most <= ahead
