"""Figures equal `trimtab.mismatch` of the whole; steps, intervals, verdict; grids of stored values; the drift split."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.support.token_tables import noisy, pieces, table, whole

import trimtab
from trimtab.diagnosis.measure.size import RoundingDetector, judge_k3, rounding_floor
from trimtab.diagnosis.records import DriftSplit, MismatchSize
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
    data = table([[30.0, -25.0], [0.1, 0.2]], behavior=[[-40.0, -41.0], [-42.0, -43.0]])
    exact = trimtab.mismatch(*padded(data, torch.float64)).finalize()
    assert whole(data).size.mismatch == pytest.approx(exact)
    assert exact["ratio_bounded"] == 0.5


def sized(data: TokenTable) -> MismatchSize:
    return whole(data).size


def test_rows_by_step_are_those_of_the_step_alone() -> None:
    data = noisy(3, 120)
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
    assert judge_k3(k3, floor, coarse) == expected


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


def logps(count: int, seed: int = 0) -> np.ndarray:
    return -np.random.default_rng(seed).exponential(1.0, count).astype(np.float32)


def bfloat16(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(values).to(torch.bfloat16).to(torch.float32).numpy()


def column(*parts: np.ndarray) -> RoundingDetector:
    result = RoundingDetector()
    for part in parts:
        result.add(part.astype(np.float32))
    return result


GRIDS = {
    "float32": lambda values: values,
    "bfloat16": bfloat16,
    "float16": lambda values: values.astype(np.float16),
    "1 decimal": lambda values: np.round(values.astype(np.float64), 1),
    "4 decimals": lambda values: np.round(values.astype(np.float64), 4),
    "6 decimals": lambda values: np.round(values.astype(np.float64), 6),
    "float32 ": lambda values: np.round(values.astype(np.float64), 8),
}


@pytest.mark.parametrize("name", GRIDS)
def test_grid_is_found_and_its_k3_is_that_of_rounding(name: str) -> None:
    exact = logps(20_000)
    stored = GRIDS[name](exact).astype(np.float32)
    result = column(stored[:7], stored[7:])
    assert result.grid == name.strip()
    if name.strip() == "float32":
        assert result.variance < 1e-13
        return
    log = stored.astype(np.float64) - exact
    assert 0.5 * result.variance == pytest.approx((np.expm1(log) - log).mean(), rel=0.1)


def test_one_finer_value_anywhere_rules_a_grid_out() -> None:
    stored = bfloat16(logps(10_000))
    stored[9_999] = -0.123456
    assert column(stored).grid == "float32"
    assert column(np.array([-0.1, -0.25]), np.array([-0.125] * 30)).grid == "3 decimals"


@pytest.mark.parametrize(
    ("values", "grid"),
    [
        (np.full(19, -0.5), "float32"),
        (np.full(20, -0.5), "bfloat16"),
        (np.zeros(1000), "float32"),
        # Above 8, float32 is no finer than 1e-6, so everything there seems to have 6 decimals.
        (-20 - logps(1000), "float32"),
    ],
)
def test_few_values_zeros_and_large_values_are_no_evidence(values: np.ndarray, grid: str) -> None:
    assert column(values).grid == grid
    assert column().grid == "float32"
    assert column().variance == 0.0


def test_floor_adds_the_columns_up_and_names_them() -> None:
    values = logps(5000)
    columns = {"logp_behavior": column(bfloat16(values)), "logp_proximal": column(values)}
    value, note = rounding_floor(columns)
    assert value == pytest.approx(0.5 * columns["logp_behavior"].variance)
    assert "in bfloat16 and logp_proximal is stored in float32: rounding alone makes a k3 of 2.9e-6" in note
    both = rounding_floor({"a": columns["logp_behavior"], "b": columns["logp_behavior"]})
    assert both[0] == pytest.approx(2 * value)


def planted(seed: int, mismatch: float, staleness: float, fresh: float, biased: bool = False) -> TokenTable:
    """Tokens whose log-ratio is the sum of two independent ones of mean ratio 1, the second only at age 5.

    biased: mismatch grows with -log p, and three quarters of the old tokens are rare but one quarter of the others.
    """
    rng = np.random.default_rng(seed)
    shape = (400, 60)
    old = np.repeat(rng.random(400) >= fresh, 60).reshape(shape)
    rare = rng.random(shape) < np.where(old, 0.75, 0.25)
    behavior = -rng.exponential(1.0, shape) * (np.where(rare, 2.0, 0.2) if biased else 1.0)
    scale = mismatch * np.sqrt(-behavior) if biased else np.full(shape, mismatch)
    stale = np.where(old, staleness, 0.0)
    ratio = (scale * rng.standard_normal(shape) - scale**2 / 2) + (stale * rng.standard_normal(shape) - stale**2 / 2)
    version = np.where(old, 5, 10)
    return table(
        ratio.tolist(), behavior=behavior.tolist(), version=version.tolist(), proximal_version=np.full(400, 10)
    )


def split(data: TokenTable) -> DriftSplit:
    return whole(data).split


def test_split_finds_planted_parts() -> None:
    # Independent normal log-ratios: k3 is half the variance of each, staleness counts at half of the tokens only.
    data = planted(0, mismatch=0.1, staleness=0.2, fresh=0.5)
    result, old = split(data), (data.version == 5).mean()
    assert result.separable
    assert result.mismatch == pytest.approx(0.005, rel=0.05)
    assert result.staleness == pytest.approx(old * 0.02, rel=0.1)
    for key, truth in (("mismatch", 0.005), ("staleness", old * 0.02)):
        assert result.intervals[key].low < truth < result.intervals[key].high


def test_parts_add_up_to_the_whole() -> None:
    data = planted(1, mismatch=0.1, staleness=0.3, fresh=0.3, biased=True)
    result = whole(data)
    assert result.split.mismatch + result.split.staleness == pytest.approx(result.size.mismatch["k3"], rel=1e-9)


def test_rare_old_tokens_are_not_mistaken_for_staleness() -> None:
    # Old tokens mismatch more than twice as much, only because they are rarer.
    data = planted(2, mismatch=0.1, staleness=0.0, fresh=0.5, biased=True)
    view = whole(data).views["version"]
    assert view.k3[1] > 2.0 * view.k3[0]
    result = split(data)
    assert abs(result.staleness) < 0.05 * result.mismatch
    assert result.intervals["staleness"].low < 0 < result.intervals["staleness"].high


def test_old_tokens_without_fresh_ones_like_them_are_not_split() -> None:
    data = planted(2, mismatch=0.1, staleness=0.0, fresh=0.5)
    far = np.where(data.version == 5, 5.0, 1.0).astype(np.float32)
    result = split(replace(data, behavior=data.behavior * far, proximal=data.trainer + data.behavior * (far - 1)))
    assert not result.separable
    assert "lies at behavior probabilities with fewer than 100 tokens of age 0" in result.why


@pytest.mark.parametrize(("seed", "responses"), [(0, 30), (2, 100), (4, 100)])
def test_all_of_age_zero_has_no_staleness_at_all(seed: int, responses: int) -> None:
    # Not even a rounding error, which the verdict would print as a figure.
    data = noisy(seed, responses)
    result = split(replace(data, version=np.repeat(data.proximal_version, np.diff(data.starts))))
    assert (result.separable, result.staleness) == (True, 0.0)
    assert "every token is of age 0" in result.why


def test_missing_columns_are_named() -> None:
    data = planted(4, mismatch=0.1, staleness=0.1, fresh=0.0)
    result = split(data)
    assert not result.separable
    assert "0 tokens are of age 0 (the youngest is 5 updates old)" in result.why
    assert "no proximal_version" in split(replace(data, proximal_version=None)).why
    assert "no policy_version" in split(replace(data, version=None)).why
    newer = split(replace(data, version=data.version + 6))
    assert not newer.separable
    assert "newer than proximal_version" in newer.why
    few = split(noisy(0, 3))
    assert not few.separable
    assert few.mismatch is None
