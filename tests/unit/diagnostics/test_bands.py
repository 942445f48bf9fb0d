"""Intervals over seeds, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.diagnostics.bands import Interval, Series, band, best, interval, rule, smoothed


def series(steps: list[float], values: list[float]) -> Series:
    return np.array(steps, dtype=np.float64), np.array(values, dtype=np.float64)


def test_few_seeds_give_their_range() -> None:
    assert interval([0.2, 0.8, 0.5]) == Interval(pytest.approx(0.5), 0.2, 0.8, 3)  # pyright: ignore[reportArgumentType]
    assert interval([0.3]) == Interval(0.3, 0.3, 0.3, 1)
    assert interval([]) is None
    assert rule(4) == "lowest to highest seed"


def test_five_seeds_give_a_bootstrap_of_the_mean() -> None:
    """Of 0, 0, 0, 0, 1 a resample's mean is k/5 with k ~ Binomial(5, 0.2).

    P(k = 0) = 0.328 > 0.025, and P(k <= 2) = 0.942 < 0.975 < P(k <= 3) = 0.993: the interval is [0, 0.6].
    """
    found = interval([0, 0, 0, 0, 1])
    assert found is not None
    assert (found.mean, found.low, found.high) == pytest.approx((0.2, 0.0, 0.6))
    assert rule(5) == "2.5 to 97.5% of the mean (bootstrap)"


def test_the_interval_of_many_seeds_is_near_that_of_the_normal_distribution() -> None:
    values = np.random.default_rng(3).normal(2.0, 1.0, 400)
    found = interval(list(values))
    assert found is not None
    half = 1.96 * values.std() / math.sqrt(400)
    assert found.low == pytest.approx(values.mean() - half, abs=0.012)
    assert found.high == pytest.approx(values.mean() + half, abs=0.012)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=9))
def test_the_mean_lies_in_its_interval_and_the_interval_among_the_seeds(values: list[float]) -> None:
    found = interval(values)
    assert found is not None
    slack = 1e-9 * max(map(abs, values)) + 1e-12
    assert min(values) - slack <= found.low <= found.high + slack
    assert found.high <= max(values) + slack
    if len(values) < 5:
        assert found.low - slack <= found.mean <= found.high + slack


def test_equal_seeds_have_no_interval() -> None:
    found = interval([0.21] * 6)
    assert found is not None
    assert (found.low, found.high) == (0.21, 0.21)


def test_a_band_covers_the_steps_all_seeds_have() -> None:
    found = band([series([1, 2, 3, 4], [1, 2, 3, 4]), series([2, 4, 6], [4, 0, 9])])
    assert found is not None
    assert found.steps.tolist() == [2, 4]
    assert found.mean.tolist() == [3, 2]
    assert found.low.tolist() == [2, 0]
    assert found.high.tolist() == [4, 4]
    assert band([series([1], [1]), series([2], [2])]) is None
    assert band([]) is None


def test_a_band_of_five_seeds_is_the_interval_at_every_step() -> None:
    seeds = [series([1, 2], [value, 10.0]) for value in (0, 0, 0, 0, 1)]
    found = band(seeds)
    assert found is not None
    assert found.low.tolist() == pytest.approx([0, 10])
    assert found.high.tolist() == pytest.approx([0.6, 10])


def interval_of(low: float, high: float, count: int = 3) -> Interval:
    return Interval((low + high) / 2, low, high, count)


def test_the_best_lies_apart_on_the_better_side() -> None:
    low, middle, high = interval_of(0, 1), interval_of(1.1, 2), interval_of(2.1, 3)
    assert best([middle, high, low], highest=True) == 1
    assert best([middle, high, low], highest=False) == 2
    touching = interval_of(1.5, 2.1)
    assert best([touching, high, low], highest=True) is None
    assert best([touching, high, low], highest=False) == 2


def test_two_seeds_or_one_group_have_no_best() -> None:
    assert best([interval_of(0, 1, 2), interval_of(5, 6)], highest=True) is None
    assert best([interval_of(0, 1), None], highest=True) is None


def test_short_curves_are_not_smoothed_and_long_ones_keep_constants_and_ends() -> None:
    short = series(list(range(79)), list(range(79)))
    assert smoothed(short) is short
    steps, values = smoothed(series(list(range(1, 1201)), [0.5] * 1200))
    assert len(steps) <= 241
    assert steps[-1] == 1200
    assert values == pytest.approx(0.5)
    # A line stays a line: the centered window of 120 / 40 = 3 on each side has its mean in the middle.
    steps, values = smoothed(series(list(range(1, 121)), [2.0 * step for step in range(1, 121)]))
    assert values[10:-10] == pytest.approx(2 * steps[10:-10])
    assert values[0] == pytest.approx(np.mean([2, 4, 6, 8]))


def test_smoothed_seeds_of_other_gaps_still_share_their_steps() -> None:
    whole = series(list(range(1, 1001)), [1.0] * 1000)
    torn = series([step for step in range(1, 1001) if step % 7], [3.0] * (1000 - 142))
    found = band([smoothed(whole), smoothed(torn)])
    assert found is not None
    assert len(found.steps) > 150
    assert found.mean == pytest.approx(2.0)
