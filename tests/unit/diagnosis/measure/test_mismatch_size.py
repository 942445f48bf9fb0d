"""Figures equal `trimtab.mismatch` of the whole; steps, intervals and the verdict."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.support.token_tables import noisy, pieces, table, whole

import trimtab
from trimtab.diagnosis.measure.size import verdict
from trimtab.diagnosis.records import MismatchSize
from trimtab.diagnosis.tokens import TokenTable

TWO = math.log(2)


def padded(data: TokenTable, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Trainer, sampler and mask as (batch, time), padded with NaN."""
    lengths = np.diff(data.starts)
    shape = (data.responses, int(lengths.max()))
    inside = np.arange(shape[1]) < lengths[:, None]
    trainer, sampler = (torch.full(shape, torch.nan, dtype=dtype) for _ in range(2))
    trainer[torch.from_numpy(inside)] = torch.from_numpy(data.trainer).to(dtype)
    sampler[torch.from_numpy(inside)] = torch.from_numpy(data.behavior).to(dtype)
    mask = torch.zeros(shape, dtype=torch.bool)
    mask[torch.from_numpy(inside)] = torch.from_numpy(data.mask)
    return trainer, sampler, mask


@pytest.mark.parametrize("noise", [1e-5, 0.05, 2.0])
def test_figures_are_those_of_mismatch(noise: float) -> None:
    data = noisy(0, 200, noise=noise)
    result = whole(*pieces(data, [13, 60, 61])).size.mismatch
    exact = trimtab.mismatch(*padded(data, torch.float64)).finalize()
    assert result.keys() == exact.keys()
    for key, value in exact.items():
        assert result[key] == pytest.approx(value, rel=1e-9, abs=1e-12), key
    if noise > 1e-4:  # else float32 has no digits left
        for key, value in trimtab.mismatch(*padded(data, torch.float32)).finalize().items():
            assert result[key] == pytest.approx(value, rel=1e-3), key


def test_figures_with_log_ratios_beyond_the_safety_bound() -> None:
    data = table([[30.0, -25.0], [0.1, 0.2]], behavior=-40.0)
    exact = trimtab.mismatch(*padded(data, torch.float64)).finalize()
    assert whole(data).size.mismatch == pytest.approx(exact)
    assert exact["ratio_bounded"] == 0.5


def sized(data: TokenTable) -> MismatchSize:
    return whole(data).size


def test_rows_by_step_are_those_of_the_step_alone() -> None:
    data = noisy(3, 120)
    assert data.step is not None
    rows = whole(*pieces(data, [50])).size.by_step
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    for row in rows:
        only = data.step == row["step"]
        cuts = np.flatnonzero(np.diff(np.concatenate([[False], only, [False]]).astype(int)))
        alone = pieces(data, cuts.tolist())[1]
        figures = sized(alone).mismatch
        assert row["step_last"] == row["step"]
        for key in row.keys() - {"step", "step_last"}:
            # Quantiles of both come from bins, here of 1/32 of the log-ratio and there of 1/128.
            room = 0.04 * abs(math.log(figures[key])) + 1e-2 if key.startswith("ratio_q") else 1e-9
            assert row[key] == pytest.approx(figures[key], rel=room, abs=1e-9), key


def test_many_steps_become_at_most_200_rows() -> None:
    plan = sized(table([[0.1]] * 1000, step=np.arange(1000, 2000)))
    assert len(plan.by_step) == 125
    assert (plan.by_step[0]["step"], plan.by_step[0]["step_last"]) == (1000, 1007)
    assert sum(row["tokens"] for row in plan.by_step) == 1000
    assert sized(table([[0.1]])).by_step == ()


def test_interval_of_k1_by_hand() -> None:
    # Two clusters of one token with log-ratios .1 and .3: k1 -.2, standard error .1, one degree of freedom.
    plan = sized(table([[0.1], [0.3]])).intervals["k1"]
    assert plan.value == pytest.approx(-0.2)
    assert (plan.low, plan.high) == pytest.approx((-0.2 - 1.2706, -0.2 + 1.2706), rel=1e-4)


def test_intervals_hold_their_value_and_stay_in_range() -> None:
    plan = sized(noisy(4, 300, noise=0.3))
    expected = {"k1", "k2", "k3", "chi2_token", "ess_token", "ratio_mean", "ppl_ratio", "pearson", "abs_diff_mean"}
    assert expected <= plan.intervals.keys()
    for key, interval in plan.intervals.items():
        assert interval.value == plan.mismatch[key]
        assert interval.low < interval.value < interval.high, key
    assert plan.intervals["k3"].low > 0
    assert plan.intervals["ess_token"].high < 1
    assert plan.intervals["pearson"].high < 1


def test_groups_widen_intervals_when_their_rows_agree() -> None:
    # 30 groups of 10 equal rows hold as much as 30 rows: the interval is about sqrt(10) as wide as without groups.
    ratios = np.repeat(np.random.default_rng(0).normal(0, 0.1, 30), 10)[:, None].tolist()
    alone, grouped = (sized(table(ratios, **extra)) for extra in ({}, {"group": np.arange(300) // 10}))
    widths = [size.intervals["k1"].high - size.intervals["k1"].low for size in (alone, grouped)]
    assert widths[1] / widths[0] == pytest.approx(math.sqrt(10), rel=0.15)


def test_more_groups_than_buckets_keep_their_interval() -> None:
    # 10,000 independent tokens of deviation .1: half a width is 1.96 * .1 / 100 however clusters are merged.
    plan = sized(table(np.random.default_rng(0).normal(0, 0.1, (10_000, 1)).tolist())).intervals["k1"]
    assert (plan.high - plan.low) / 2 == pytest.approx(0.00196, rel=0.1)


def test_identical_policies_are_certain() -> None:
    plan = sized(table([[0.0] * 5] * 20, behavior=-np.random.default_rng(0).exponential(1.0, (20, 5))))
    assert plan.verdict == "exact"
    assert (plan.intervals["k3"].low, plan.intervals["k3"].high) == (0, 0)
    assert (plan.intervals["ess_token"].low, plan.intervals["ess_token"].high) == (1, 1)
    assert (plan.intervals["ratio_mean"].low, plan.intervals["ratio_mean"].high) == pytest.approx((1, 1))


def test_products_carried_by_one_sequence_have_no_interval() -> None:
    assert "ess_seq" in sized(noisy(5, 100, noise=0.01)).intervals
    plan = sized(table([[0.0]] * 99 + [[15.0, 15.0, 15.0]], behavior=-50.0))
    assert "ess_seq" not in plan.intervals
    assert all(math.isfinite(interval.value) for interval in plan.intervals.values())


def test_one_response_has_figures_and_no_interval() -> None:
    plan = sized(table([[TWO, 0.0]]))
    assert plan.mismatch["ratio_mean"] == pytest.approx(1.5)
    assert math.isnan(plan.intervals["ratio_mean"].low)


@pytest.mark.parametrize(
    ("k3", "floor", "coarse", "expected"),
    [
        (3e-11, 1e-16, False, "exact"),
        (3e-6, 2e-6, True, "rounding"),
        (0.0, 2e-6, True, "rounding"),
        (5e-6, 2e-6, True, "dense"),
        (1.4e-3, 1e-16, False, "small-dense"),
        (4.8e-2, 1e-16, False, "moe"),
        (0.2, 1e-16, False, "beyond"),
    ],
)
def test_verdicts(k3: float, floor: float, coarse: bool, expected: str) -> None:
    assert verdict(k3, floor, coarse) == expected


def test_bfloat16_on_both_sides_of_one_policy_is_rounding() -> None:
    rng = np.random.default_rng(0)
    exact = -rng.exponential(1.0, (50, 40))
    moved = exact + 1e-3 * rng.standard_normal(exact.shape)
    both = [
        torch.from_numpy(values).to(torch.bfloat16).to(torch.float32).numpy().reshape(-1) for values in (exact, moved)
    ]
    plan = sized(replace(table([[0.0] * 40] * 50), behavior=both[0], proximal=both[1]))
    assert plan.verdict == "rounding"
    assert plan.floor_note.startswith("logp_behavior is stored in bfloat16 and logp_proximal is stored in bfloat16")
