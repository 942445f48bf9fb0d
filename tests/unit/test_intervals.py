"""Intervals over seeds and clusters, by hand, against closed forms and known truth."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from trimtab.intervals import (
    SeedMean,
    cluster_intervals,
    contenders,
    detectable_lead,
    interval_method,
    may_be_best,
    seed_interval,
    student_quantile,
)


def test_few_seeds_give_their_range() -> None:
    assert seed_interval([0.2, 0.8, 0.5]) == SeedMean(pytest.approx(0.5), 0.2, 0.8, 3)  # pyright: ignore[reportArgumentType]
    assert seed_interval([0.3]) == SeedMean(0.3, 0.3, 0.3, 1)
    assert seed_interval([]) is None
    assert interval_method(1) == "a single seed, no interval"
    assert [interval_method(2), interval_method(4)] == ["range of 2 seeds", "range of 4 seeds"]


def test_five_seeds_give_students_interval_of_the_mean() -> None:
    """Of 0.1, 0.2, 0.3, 0.4, 0.5: the mean .3, the standard deviation .158114 (n - 1), t(4) = 2.7764 (any table of it),
    so half the interval is 2.7764 * .158114 / sqrt(5) = .196321."""
    interval = seed_interval([0.1, 0.2, 0.3, 0.4, 0.5])
    assert (interval.mean, interval.low, interval.high) == pytest.approx((0.3, 0.103679, 0.496321), abs=1e-4)
    assert interval_method(5) == "95% interval of the mean (Student's t)"


def test_an_interval_is_cut_where_no_such_number_lies() -> None:
    """Of 0, 0, 0, 0, 1: half the interval is 2.7764 * .447214 / sqrt(5) = .55528 around .2."""
    interval = seed_interval([0, 0, 0, 0, 1], limits=(0, 1))
    assert (interval.low, interval.high) == pytest.approx((0.0, 0.75528), abs=3e-4)


@pytest.mark.parametrize("seeds", [5, 8, 30, 31, 60])
def test_95_of_100_intervals_hold_the_true_mean(seeds: int) -> None:
    """Of 4000 draws 95% are 3800, with a standard deviation of 13.8; 4.5 of them are passed once in 150,000 runs."""
    draws = np.random.default_rng(seeds).normal(1.0, 2.0, (4000, seeds))
    result = [seed_interval(row) for row in draws.tolist()]
    held = sum(item is not None and item.low <= 1.0 <= item.high for item in result)
    assert abs(held - 3800) < 4.5 * 13.8


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=9))
def test_the_mean_lies_in_its_interval_and_ranges_are_of_the_seeds(values: list[float]) -> None:
    interval = seed_interval(values)
    slack = 1e-9 * max(map(abs, values)) + 1e-12
    assert interval.low - slack <= interval.mean <= interval.high + slack
    if len(values) < 5:
        assert (interval.low, interval.high) == (min(values), max(values))


def test_equal_seeds_have_no_interval() -> None:
    interval = seed_interval([0.21] * 6)
    assert (interval.low, interval.high) == (0.21, 0.21)


def mean(sums: Tensor) -> dict[str, Tensor]:
    return {"mean": sums[:, 1] / sums[:, 0], "square": (sums[:, 1] / sums[:, 0]).square()}


def test_large_samples_have_the_normal_interval() -> None:
    values = np.random.default_rng(0).normal(3.0, 2.0, 1000)
    intervals = cluster_intervals(np.stack([np.ones(1000), values], axis=1), mean, seed=0)
    half = 1.96 * values.std(ddof=1) / math.sqrt(1000)
    assert intervals["mean"].value == pytest.approx(values.mean())
    assert intervals["mean"].low == pytest.approx(values.mean() - half, abs=0.15 * half)
    assert intervals["mean"].high == pytest.approx(values.mean() + half, abs=0.15 * half)
    # The delta method: the deviation of a square is 2 |mean| times as large.
    assert intervals["square"].high - intervals["square"].low == pytest.approx(4 * half * values.mean(), rel=0.1)


def test_mean_ratio_of_correlated_rows_is_covered() -> None:
    # 20 groups of 8 rows of about 50 tokens; ratios of mean 1, correlated within a group. Over 200 sets of data the
    # interval by group must hold 1 in about 95%; the one that takes rows as independent does so in far fewer.
    rng = np.random.default_rng(0)

    def covered(by_group: bool) -> bool:
        tokens = rng.geometric(1 / 50, (20, 8)).astype(np.float64)
        drift = rng.normal(0, 0.05, (20, 1))
        noise = rng.normal(0, 1, (20, 8)) * 0.1 / np.sqrt(tokens)
        rows = np.stack([tokens, np.exp(drift - 0.05**2 / 2) * (1 + noise) * tokens], axis=2)
        intervals = cluster_intervals(rows.sum(axis=1) if by_group else rows.reshape(-1, 2), mean, seed=0)["mean"]
        return intervals.low <= 1 <= intervals.high

    # 95% of 200 is 190, two deviations are 6.
    assert 182 <= sum(covered(by_group=True) for _ in range(200)) <= 198
    assert sum(covered(by_group=False) for _ in range(30)) <= 22


def simulated(methods: int, seeds: int, trials: int, means: tuple[float, ...] = ()) -> np.ndarray:
    """Accuracies (trials, methods, seeds), with a part that all methods of a seed share."""
    random = np.random.default_rng(methods * seeds)
    values = random.normal(size=(trials, methods, seeds)) + 2 * random.normal(size=(trials, 1, seeds))
    return values + np.array([*means, *[0.0] * (methods - len(means))])[:, None]


@pytest.mark.parametrize(("methods", "seeds"), [(2, 5), (4, 8), (14, 5)])
def test_of_equal_methods_each_may_be_the_best_in_95_of_100_experiments(methods: int, seeds: int) -> None:
    """Bonferroni's bound is nearly reached; 1500 experiments have a standard deviation of at most .006."""
    stays = np.array([contenders(trial) for trial in simulated(methods, seeds, 1500)])
    assert 0.94 < stays.mean() < 0.975
    assert stays[:, 0].mean() > 0.93


@pytest.mark.parametrize(("methods", "seeds"), [(2, 8), (6, 8), (14, 10)])
def test_the_stated_lead_is_seen_in_80_of_100_experiments(methods: int, seeds: int) -> None:
    """Differences of two methods have a standard deviation of sqrt(2); that of these seeds is as large."""
    alike = np.linspace(-1, 1, seeds)
    lead = detectable_lead((alike / alike.std(ddof=1) * math.sqrt(2)).tolist(), methods)
    # The others are far behind, so that it is the lead of the first over the second that decides.
    trials = simulated(methods, seeds, 1500, (lead, 0.0, *[-50.0] * (methods - 2)))
    seen = np.mean([not contenders(trial)[1] for trial in trials])
    assert 0.76 < seen < 0.86


def test_contenders_by_hand() -> None:
    """Leads of the first over the second are .1, .2 and .3: t = .2 / (.1 / sqrt(3)) = 3.46, above t(2) = 2.92 at 5%,
    the bound of two methods, and below 4.30 at 2.5%, that of three."""
    first, second = [0.5, 0.7, 0.9], [0.4, 0.5, 0.6]
    assert student_quantile(2, 0.95) == pytest.approx(2.919986, abs=1e-4)
    assert contenders([first, second]) == [True, False]
    assert contenders([first, second, [0.0, 0.0, 0.0]]) == [True, True, False]
    assert contenders([first, [0.4, 0.5, math.nan]]) == [True, True], "two seeds in common: t(1) = 6.31 at 5%"
    assert contenders([[0.9], [0.1]]) == [True, True]
    assert detectable_lead([0.1, 0.2, 0.3], 2) == pytest.approx((2.919986 + 1.060660) * 0.1 / math.sqrt(3), abs=1e-5)
    assert math.isnan(detectable_lead([0.1], 2))


def test_values_are_paired_by_seed_whatever_their_order() -> None:
    """The second trails by .1, .2 and .3 with the seeds 7, 3 and 5; in the order given its leads would be mixed."""
    first, second = {7: 0.5, 3: 0.7, 5: 0.9}, {5: 0.6, 7: 0.4, 3: 0.5}
    assert may_be_best([first, second]) == [True, False]
    assert may_be_best([second, first]) == [False, True]
    assert may_be_best([first, {seed: value for seed, value in second.items() if seed != 3}]) == [True, True], "two"
    assert may_be_best([first, {seed + 1: value for seed, value in second.items()}]) == [True, True], "none in common"
    assert may_be_best([]) == []
