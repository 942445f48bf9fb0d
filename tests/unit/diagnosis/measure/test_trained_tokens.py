"""Trained tokens by hand; bins with edges by hand and numpy's quantiles; sums by key that merge in any order."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.token_tables import table, trained

from trimtab.diagnosis.measure import trained_tokens as bins
from trimtab.diagnosis.measure.trained_tokens import FIELDS, StepSums, hash_index, plane


def test_sums_of_responses_by_hand() -> None:
    # Ratios 2 and 1/2 at the trained tokens of the first response, 4 in the third; the second has no trained token.
    data = table(
        [[math.log(2), 9.0, -math.log(2)], [5.0], [math.log(4)]],
        behavior=[[math.log(0.25), 0.0, math.log(0.5)], [0.0], [math.log(0.25)]],
        mask=[[True, False, True], [False], [True]],
    )
    metrics = trained(data)
    assert metrics.places.tolist() == [0, 2, 4]
    assert metrics.responses.tolist() == [0, 2]
    assert metrics.rows.tolist() == [0, 0, 1]
    assert metrics.lengths.tolist() == [2, 1]
    log2 = math.log(2)
    expected = {"tokens": (2, 1), "sequences": (1, 1), "k3": (0.5, 3 - 2 * log2)}
    expected |= {"log": (0, 2 * log2), "log_square": (2 * log2**2, 4 * log2**2), "log_abs": (2 * log2, 2 * log2)}
    expected |= {"excess": (0.5, 3), "excess_square": (1.25, 9), "product": (1, 4), "product_square": (1, 16)}
    expected |= {"p": (0.75, 1), "q": (0.75, 0.25), "p_q": (0.25, 0.25)}
    expected |= {"p_square": (0.3125, 1), "q_square": (0.3125, 0.0625)}
    expected |= {"ppl_ratio": (1, 0.25), "ppl_train": (8**0.5, 1)}
    assert dict(zip(FIELDS, metrics.sums.T.tolist(), strict=True)) == {
        name: pytest.approx(values, rel=1e-6, abs=1e-6) for name, values in expected.items()
    }
    # Extremes of the trained tokens, ratios 2 and 1/2, and 4 alone.
    assert metrics.largest.ravel() == pytest.approx([log2, log2, 0, 2 * log2, -2 * log2, 2 * log2], rel=1e-6)


def test_a_trained_token_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="not finite"):
        trained(table([[0.0, math.nan]]))
    assert len(trained(table([[0.0, math.nan]], mask=[[True, False]]))) == 1


def test_clusters_are_groups_of_a_step() -> None:
    ratios = [[0.0]] * 4
    alone = trained(table(ratios)).cluster
    assert len(set(alone.tolist())) == 4
    groups = trained(table(ratios, group=[7, 7, 8, 7])).cluster
    assert groups[0] == groups[1] == groups[3] != groups[2]
    stepped = trained(table(ratios, group=[7, 7, 8, 7], step=[1, 1, 1, 2])).cluster
    assert stepped[0] == stepped[1]
    assert len(set(stepped.tolist())) == 3
    # Swapping what is step and what is group must give other clusters.
    assert trained(table([[0.0]], group=[1], step=[2])).cluster != trained(table([[0.0]], group=[2], step=[1])).cluster


def test_turns_by_hand() -> None:
    # Trained runs of 2 and 3 tokens around an untrained one; the leading untrained token begins no turn; then a
    # response of one turn that follows without a gap.
    data = table([[0.0] * 7, [0.0] * 2], mask=[[False, True, True, False, True, True, True], [True, True]])
    tokens = trained(data)
    assert tokens.at_tokens(data.turn_number).tolist() == [0, 0, 1, 1, 1, 0, 0]
    after, before = tokens.around_turns
    assert after[2:5].tolist() == [0, 1, 2]
    assert before[:2].tolist() == [-2, -1]
    assert (np.delete(after, [2, 3, 4]) > 1e9).all()
    assert (before[2:] < -1e9).all()


def test_scrambled_numbers_are_even_and_fixed() -> None:
    result = hash_index(np.arange(100_000, dtype=np.uint64))
    assert len(np.unique(result)) == 100_000
    share = np.bincount((result >> np.uint64(60)).astype(int), minlength=16) / 100_000
    assert share == pytest.approx(np.full(16, 1 / 16), rel=0.05)
    # First output of the published generator seeded with 0.
    assert int(result[0]) == 0xE220A8397B1DCDAF


def test_a_log_prob_far_above_zero_overflows_nothing() -> None:
    metrics = trained(table([[-1000.0, math.log(0.5)]], behavior=[[1000.0, 0.0]]))
    assert np.isfinite(np.square(metrics.sums)).all()  # as variances over responses need them
    assert plane(metrics.q, metrics.p, 10).sum() == 2


def test_log_ratio_bins_are_symmetric_and_take_everything() -> None:
    values = np.array([0.0, -0.0, 1e-12, 1e-5, -1e-5, 25.0, 900.0, -900.0])
    index = bins.log_ratio_bin(values) - bins.LOG_RATIO_BINS // 2
    assert index[:3].tolist() == [0, 0, 0]
    assert index[3] == -index[4] > 0
    assert 0 < index[5] <= index[6] == -index[7] == bins.LOG_RATIO_BINS // 2


def histogram(values: np.ndarray) -> np.ndarray:
    return np.bincount(bins.log_ratio_bin(values), minlength=bins.LOG_RATIO_BINS)[None]


@given(st.integers(1, 200), st.sampled_from([1e-7, 1e-5, 1e-2, 1.0, 8.0]), st.integers(0, 1000))
def test_quantiles_are_within_a_bin_of_numpys(count: int, scale: float, seed: int) -> None:
    values = scale * np.random.default_rng(seed).uniform(-1, 1, count)
    levels = (0.02, 0.5, 0.98)
    result = bins.quantiles(histogram(values), levels)[0]
    # A bin is at most 1/32 of its values wide, and a quantile between two values lies between the neighbors.
    low, high = (np.quantile(values, levels, method=side) for side in ("lower", "higher"))
    room = np.maximum(np.abs(low), np.abs(high)) / 32 + 1e-9
    assert (result >= low - room).all()
    assert (result <= high + room).all()


def test_quantiles_of_many_are_numpys() -> None:
    values = np.random.default_rng(0).normal(0.01, 0.1, 100_000)
    result = bins.quantiles(histogram(values), (0.02, 0.5, 0.98))[0]
    assert result == pytest.approx(np.quantile(values, (0.02, 0.5, 0.98)), rel=2e-3)


def test_quantiles_of_zeros_and_of_nothing() -> None:
    both = np.concatenate([histogram(np.zeros(3)), np.zeros((1, bins.LOG_RATIO_BINS), dtype=np.int64)])
    assert bins.quantiles(both, (0.1, 0.9))[0].tolist() == [0.0, 0.0]
    assert np.isnan(bins.quantiles(both, (0.1, 0.9))[1]).all()


def test_a_probability_bin_includes_its_upper_edge() -> None:
    # (0.46, 1], (0.22, 0.46], ... three a decade; the last also takes impossible tokens; a hair above 0 is certain.
    logp = np.log([0.99, 0.465, 0.46, 0.2, 9e-5, 1e-9])
    assert bins.probability_bin(np.append(logp, [1e-7, -1e30])).tolist() == [14, 14, 13, 12, 2, 0, 14, 0]


def filled(most: int, steps: list[int], tables: int = 1) -> StepSums:
    """One token of log-ratio bin `step` for each step, sums 1, largest value the step."""
    ledger = StepSums(most)
    for part in np.array_split(np.array(steps), tables):
        ledger.add(part, np.ones((len(part), 1)), part[:, None].astype(float), (np.arange(len(part)), part))
    return ledger


def test_order_of_steps_changes_nothing() -> None:
    steps = np.random.default_rng(0).permutation(500).tolist()
    shuffled, ordered = filled(60, steps, 7), filled(60, sorted(steps), 3)
    assert shuffled.width == ordered.width == 16
    for (key, row), (other_key, other) in zip(shuffled.rows(), ordered.rows(), strict=True):
        assert key == other_key
        assert row[0] == other[0]
        assert np.array_equal(row[2], other[2])
