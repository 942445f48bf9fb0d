"""Intervals over seeds, by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.intervals import Interval, best, interval, interval_method
from trimtab.report.curves import Band, Series, band, thinned, trailing


def series(steps: list[float], values: list[float]) -> Series:
    return np.array(steps, dtype=np.float64), np.array(values, dtype=np.float64)


def test_few_seeds_give_their_range() -> None:
    assert interval([0.2, 0.8, 0.5]) == Interval(pytest.approx(0.5), 0.2, 0.8, 3)  # pyright: ignore[reportArgumentType]
    assert interval([0.3]) == Interval(0.3, 0.3, 0.3, 1)
    assert interval([]) is None
    assert interval_method(1) == "a single seed, no interval"
    assert [interval_method(2), interval_method(4)] == ["range of 2 seeds", "range of 4 seeds"]


def test_five_seeds_give_students_interval_of_the_mean() -> None:
    """Of 0.1, 0.2, 0.3, 0.4, 0.5: the mean .3, the standard deviation .158114 (n - 1), t(4) = 2.7764 (any table of it),
    so half the interval is 2.7764 * .158114 / sqrt(5) = .196321."""
    found = interval([0.1, 0.2, 0.3, 0.4, 0.5])
    assert found is not None
    assert (found.mean, found.low, found.high) == pytest.approx((0.3, 0.103679, 0.496321), abs=1e-4)
    assert interval_method(5) == "95% interval of the mean (Student's t)"


def test_an_interval_is_cut_where_no_such_number_lies() -> None:
    """Of 0, 0, 0, 0, 1: half the interval is 2.7764 * .447214 / sqrt(5) = .55528 around .2."""
    found = interval([0, 0, 0, 0, 1], limits=(0, 1))
    assert found is not None
    assert (found.low, found.high) == pytest.approx((0.0, 0.75528), abs=3e-4)


@pytest.mark.parametrize("seeds", [5, 8, 30, 31, 60])
def test_95_of_100_intervals_hold_the_true_mean(seeds: int) -> None:
    """Of 4000 draws 95% are 3800, with a standard deviation of 13.8; 4.5 of them are passed once in 150,000 runs."""
    draws = np.random.default_rng(seeds).normal(1.0, 2.0, (4000, seeds))
    found = [interval(row) for row in draws.tolist()]
    held = sum(item is not None and item.low <= 1.0 <= item.high for item in found)
    assert abs(held - 3800) < 4.5 * 13.8


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=9))
def test_the_mean_lies_in_its_interval_and_ranges_are_of_the_seeds(values: list[float]) -> None:
    found = interval(values)
    assert found is not None
    slack = 1e-9 * max(map(abs, values)) + 1e-12
    assert found.low - slack <= found.mean <= found.high + slack
    if len(values) < 5:
        assert (found.low, found.high) == (min(values), max(values))


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


def test_a_band_of_five_seeds_is_their_range_too() -> None:
    found = band([series([1, 2], [value, 10.0]) for value in (0, 0, 0, 0, 1)])
    assert found is not None
    assert (found.low.tolist(), found.high.tolist()) == ([0, 10], [1, 10])


def test_a_thinned_band_lets_nothing_stick_out() -> None:
    """1201 points in threes: the spike at step 500 and the dip at step 700 stay in the area."""
    steps = np.arange(1.0, 1202.0)
    low, high = np.zeros(1201), np.ones(1201)
    low[699], high[499] = -5.0, 7.0
    found = thinned(Band(steps, np.arange(1201.0), low, high))
    assert len(found.steps) == 401
    assert (found.low.min(), found.high.max()) == (-5.0, 7.0)
    assert found.mean[:2].tolist() == [1.0, 4.0]
    assert found.mean[-1] == 1200.0, "the last group has one point"
    short = Band(steps[:480], steps[:480], low[:480], high[:480])
    assert thinned(short) is short


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


def test_an_average_looks_back_only() -> None:
    """A step from 0 to 1 at point 501 of 1000 is not seen before it, and in full 50 points later."""
    short = series(list(range(399)), list(range(399)))
    assert trailing(short) is short
    jump = [0.0] * 500 + [1.0] * 500
    steps, values = trailing(series(list(range(1, 1001)), jump))
    assert len(steps) == 1000
    # The window at index i is values[i - 49 .. i]: a twentieth of 1000 are 50 points.
    assert values[:500].tolist() == [0.0] * 500
    assert values[500:503] == pytest.approx([1 / 50, 2 / 50, 3 / 50])
    assert values[549:] == pytest.approx(1.0)
    _, line = trailing(series(list(range(1, 401)), [2.0 * step for step in range(1, 401)]))
    assert line[:3] == pytest.approx([2, 3, 4]), "fewer points at the start"
    assert line[19:] == pytest.approx([2 * step - 19 for step in range(20, 401)]), "twenty points, so 9.5 steps late"
