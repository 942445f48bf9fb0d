"""Intervals against closed forms and known truth."""

from __future__ import annotations

import math

import numpy as np
import pytest
from torch import Tensor

from trimtab.diagnosis.measure.bootstrap import intervals, resampled


def mean(sums: Tensor) -> dict[str, Tensor]:
    return {"mean": sums[:, 1] / sums[:, 0], "square": (sums[:, 1] / sums[:, 0]).square()}


def test_large_samples_have_the_normal_interval() -> None:
    values = np.random.default_rng(0).normal(3.0, 2.0, 1000)
    found = intervals(np.stack([np.ones(1000), values], axis=1), mean, seed=0)
    half = 1.96 * values.std(ddof=1) / math.sqrt(1000)
    assert found["mean"].value == pytest.approx(values.mean())
    assert found["mean"].low == pytest.approx(values.mean() - half, abs=0.15 * half)
    assert found["mean"].high == pytest.approx(values.mean() + half, abs=0.15 * half)
    # The delta method: the deviation of a square is 2 |mean| times as large.
    assert found["square"].high - found["square"].low == pytest.approx(4 * half * values.mean(), rel=0.1)


def test_few_clusters_use_students_t() -> None:
    # Mean 2 of 1, 2, 3: standard error 1 / sqrt(3), two degrees of freedom.
    found = intervals(np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]]), mean, seed=0)["mean"]
    assert found.high - 2 == pytest.approx(4.303 / math.sqrt(3))
    assert 2 - found.low == pytest.approx(4.303 / math.sqrt(3))


def test_one_cluster_has_no_interval() -> None:
    found = intervals(np.array([[2.0, 6.0]]), mean, seed=0)["mean"]
    assert found.value == 3
    assert math.isnan(found.low)
    assert math.isnan(found.high)


def test_a_constant_has_an_interval_of_no_width() -> None:
    sums = np.stack([np.arange(1.0, 21.0), 3 * np.arange(1.0, 21.0)], axis=1)
    found = intervals(sums, mean, seed=0)["mean"]
    assert (found.low, found.high) == pytest.approx((3.0, 3.0))


def test_draws_are_with_replacement_and_fixed_by_the_seed() -> None:
    draws = resampled(50, seed=3)
    assert (draws.sum(axis=1) == 50).all()
    # The variance of a count is 1 - 1 / n.
    assert draws.var() == pytest.approx(0.98, rel=0.03)
    assert np.array_equal(draws, resampled(50, seed=3))
    assert not np.array_equal(draws, resampled(50, seed=4))


def test_mean_ratio_of_correlated_rows_is_covered() -> None:
    # 20 groups of 8 rows of about 50 tokens; ratios of mean 1, correlated within a group. Over 200 sets of data the
    # interval by group must hold 1 in about 95%; the one that takes rows as independent does so in far fewer.
    rng = np.random.default_rng(0)

    def covered(by_group: bool) -> bool:
        tokens = rng.geometric(1 / 50, (20, 8)).astype(np.float64)
        drift = rng.normal(0, 0.05, (20, 1))
        noise = rng.normal(0, 1, (20, 8)) * 0.1 / np.sqrt(tokens)
        rows = np.stack([tokens, np.exp(drift - 0.05**2 / 2) * (1 + noise) * tokens], axis=2)
        found = intervals(rows.sum(axis=1) if by_group else rows.reshape(-1, 2), mean, seed=0)["mean"]
        return found.low <= 1 <= found.high

    # 95% of 200 is 190, two deviations are 6.
    assert 182 <= sum(covered(by_group=True) for _ in range(200)) <= 198
    assert sum(covered(by_group=False) for _ in range(30)) <= 22
