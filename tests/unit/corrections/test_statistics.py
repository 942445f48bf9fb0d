"""Mismatch statistics: hand numbers, independent formulas, and quantiles from a histogram."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from trimtab.corrections import Histogram, Weight, compute_correction
from trimtab.corrections.correction import BLOCK_TOKENS
from trimtab.corrections.policy_logps import PolicyLogps
from trimtab.corrections.statistics import QUANTILES
from trimtab.objectives import mismatch


def quantiles(log_ratio: torch.Tensor) -> torch.Tensor:
    return Histogram.of(log_ratio, torch.ones_like(log_ratio, dtype=torch.bool)).quantiles(QUANTILES)


def test_two_tokens_by_hand():
    train = torch.tensor([[0.5, 0.25]], dtype=torch.float64).log()
    rollout = torch.tensor([[0.25, 0.5]], dtype=torch.float64).log()
    statistics = mismatch(train, rollout, torch.ones(1, 2, dtype=torch.bool)).finalize()
    log2 = math.log(2)
    expected = {
        "k1": 0.0,
        "k2": log2**2 / 2,
        "k3": ((1 - log2) + (log2 - 0.5)) / 2,
        "chi2_token": (4 + 0.25) / 2 - 1,
        "chi2_seq": 0.0,
        "ess_token": 2.5**2 / (2 * 4.25),
        "ess_seq": 1.0,
        "ratio_mean": 1.25,
        "ppl_ratio": 1.0,
        "ppl_train": 8**0.5,
        "pearson": -1.0,
        "abs_diff_mean": log2,
        "abs_diff_max": log2,
        "ratio_min": 0.5,
        "ratio_max": 2.0,
        "ratio_q50": 1.25,
        "ratio_bounded": 0.0,
        "log_ratio_seq_max": 0.0,
        "tokens": 2.0,
        "sequences": 1.0,
    }
    for key, value in expected.items():
        assert statistics[key] == pytest.approx(value, rel=5e-3, abs=1e-12), key
        if not key.startswith("ratio_q"):
            assert statistics[key] == pytest.approx(value, rel=1e-9, abs=1e-12), key
    assert statistics.keys() == {*expected, "ratio_q01", "ratio_q05", "ratio_q95", "ratio_q99"}


def test_sequence_statistics_by_hand():
    """Three sequences with products 3, 1/4 and none; lengths 1, 2 and 0."""
    log = torch.tensor([[math.log(3), 9.0], [-math.log(2), -math.log(2)], [7.0, 7.0]], dtype=torch.float64)
    mask = torch.tensor([[True, False], [True, True], [False, False]])
    statistics = mismatch(log - 1, torch.full_like(log, -1.0), mask).finalize()
    assert statistics["chi2_seq"] == pytest.approx((9 + 1 / 16) / 2 - 1)
    assert statistics["ess_seq"] == pytest.approx(3.25**2 / (2 * (9 + 1 / 16)))
    assert statistics["ppl_ratio"] == pytest.approx((1 / 3 + 2) / 2)
    assert statistics["ppl_train"] == pytest.approx(math.e * (1 / 3 + 2) / 2)  # the sampler's is e
    assert (statistics["ratio_min"], statistics["ratio_max"]) == pytest.approx((1 / 2, 3))  # not of untrained tokens
    assert statistics["log_ratio_seq_max"] == pytest.approx(math.log(3))
    assert (statistics["tokens"], statistics["sequences"]) == (3, 2)


@given(seed=st.integers(0, 999), spread=st.sampled_from([1e-5, 1e-2, 0.5]))
@settings(max_examples=8, deadline=None)
def test_statistics_equal_the_plain_formulas(seed, spread):
    make = torch.Generator().manual_seed(seed)
    rollout = -torch.rand(5, 40, generator=make, dtype=torch.float64) * 3
    log = spread * torch.randn(5, 40, generator=make, dtype=torch.float64)
    mask = torch.rand(5, 40, generator=make) < 0.7
    statistics = mismatch(rollout + log, rollout, mask).finalize()
    x, p, q = log[mask], (rollout + log)[mask].exp(), rollout[mask].exp()
    assert statistics["k1"] == pytest.approx(-x.mean().item(), rel=1e-6)
    assert statistics["k3"] == pytest.approx((x.exp() - 1 - x).mean().item(), rel=1e-4)
    assert statistics["chi2_token"] == pytest.approx((2 * x).exp().mean().item() - 1, rel=1e-6)
    assert statistics["ess_token"] == pytest.approx((x.exp().sum() ** 2 / (len(x) * (2 * x).exp().sum())).item())
    assert statistics["pearson"] == pytest.approx(torch.corrcoef(torch.stack([p, q]))[0, 1].item(), rel=1e-6)
    assert statistics["k3"] >= 0


@pytest.mark.parametrize("low", [0.98, 0.5, 0.0])
def test_the_correlation_of_nearly_equal_probabilities_keeps_its_digits_in_float32(low):
    """Of policies that are almost certain (above 0.98), and of such as give 1e-4 to every token (below 1)."""
    make = torch.Generator().manual_seed(0)
    p = (low + (1 - low) * torch.rand(512, 2048, generator=make)) * (1.0 if low else 1e-4)
    noise = 0.047 * p.std() * torch.randn(p.shape, generator=make)
    train, rollout = p.log(), (p + noise).clamp(1e-8, 1).log()
    found = mismatch(train, rollout, torch.ones_like(p, dtype=torch.bool)).finalize()["pearson"]
    both = torch.stack([train.flatten(), rollout.flatten()]).double().exp()
    assert 1 - found == pytest.approx(1 - torch.corrcoef(both)[0, 1].item(), rel=0.01)


def test_k3_keeps_its_digits_in_float32_where_two_precise_engines_agree():
    rollout = -torch.rand(64, 256, generator=torch.Generator().manual_seed(0))
    log = torch.full((64, 256), 2.0**-15)  # exact in float32 beside log-probs below 1
    statistics = mismatch(rollout + log, rollout, torch.ones(64, 256, dtype=torch.bool)).finalize()
    assert statistics["k3"] == pytest.approx(2.0**-31, rel=0.02)


@given(seed=st.integers(0, 999), spread=st.sampled_from([1e-4, 0.05, 1.0, 5.0]), shift=st.floats(-3, 3))
@settings(max_examples=25, deadline=None)
def test_quantiles_are_within_one_percent(seed, spread, shift):
    make = torch.Generator().manual_seed(seed)
    log = shift + spread * torch.randn(3001, generator=make, dtype=torch.float64).clamp(-3.3, 3.3)
    exact = log.exp().quantile(torch.tensor(QUANTILES, dtype=torch.float64))
    assert_close(quantiles(log), exact, rtol=0.0045, atol=0)


def test_quantiles_near_one_resolve_geometric_bounds():
    log = torch.linspace(-0.01, 0.01, 4001, dtype=torch.float64)
    exact = log.exp().quantile(torch.tensor(QUANTILES, dtype=torch.float64))
    assert (quantiles(log) - exact).abs().max() < 5e-5


def test_ratio_one_is_exactly_one_and_the_ends_are_counted():
    assert quantiles(torch.zeros(7)).tolist() == [1.0] * 5
    ends = torch.tensor([-50.0, 0.0, 0.0, 50.0, 1e4, float("nan")])
    result = Histogram.of(ends, torch.ones(6, dtype=torch.bool))
    assert result.beyond == 4
    assert result.counts.sum() == 6
    assert quantiles(torch.zeros(0)).isnan().all()


def test_quantiles_of_few_values_interpolate_like_torch():
    log = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64).log()
    assert_close(quantiles(log), torch.tensor([1.02, 1.1, 2.0, 3.8, 3.96], dtype=torch.float64), rtol=4e-3, atol=0)


def test_bounded_quantiles_follow_the_weight():
    log = torch.linspace(-2, 2, 1001, dtype=torch.float64)
    rollout = torch.zeros(1, 1001, dtype=torch.float64)
    mask = torch.ones(1, 1001, dtype=torch.bool)
    for weight in (Weight(max=1.5), Weight(bound="clip", min=0.6, max=3.0), Weight(bound="mask", min=0.5, max=2.0)):
        results = compute_correction(PolicyLogps(None, rollout, mask, proximal=log[None]), weight=weight)
        summary = results.statistics["weight"].summary()
        exact = results.weight[0].quantile(torch.tensor(QUANTILES, dtype=torch.float64))
        for level, value in zip(QUANTILES, exact.tolist(), strict=True):
            assert float(summary[f"/q{round(level * 100):02d}"]) == pytest.approx(value, rel=0.01, abs=1e-6)
        assert float(summary["/mean"]) == pytest.approx(results.weight.mean().item())
        changed = (results.weight[0] - log.exp()).abs() > 1e-9
        assert float(summary["/changed"]) == pytest.approx(changed.double().mean().item())


def test_blocks_of_a_large_batch_add_up(monkeypatch):
    make = torch.Generator().manual_seed(0)
    rollout = -torch.rand(33, 50, generator=make)
    train, mask = rollout + 0.1 * torch.randn(33, 50, generator=make), torch.rand(33, 50, generator=make) < 0.6
    logps, weight = PolicyLogps(None, rollout, mask, proximal=train), Weight("sequence", "mask", 0.8, 1.3)
    whole = compute_correction(logps, weight=weight, measure=True)
    monkeypatch.setitem(BLOCK_TOKENS, "cpu", 250)  # five rows: the last block is smaller
    parts = compute_correction(logps, weight=weight, measure=True)
    assert_close(parts.weight, whole.weight)
    assert (parts.keep == whole.keep).all()
    values = [{name: float(one) for name, one in of.statistics[""].summary().items()} for of in (parts, whole)]
    assert values[0] == pytest.approx(values[1], rel=1e-5)


def test_extreme_ratios_leave_finite_statistics_and_are_counted():
    train = torch.tensor([[0.0, -1e4, 1e4, 0.0]])
    statistics = mismatch(train, torch.zeros(1, 4), torch.ones(1, 4, dtype=torch.bool)).finalize()
    assert statistics["ratio_bounded"] == 0.5
    assert math.isfinite(statistics["chi2_token"])
    assert statistics["abs_diff_max"] == 1e4


def test_non_finite_input_shows_in_the_report_instead_of_becoming_ratio_one():
    train = torch.tensor([[0.0, float("nan")]])
    statistics = mismatch(train, torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)).finalize()
    assert math.isnan(statistics["k1"])
    assert math.isnan(statistics["k3"])
