"""Every statistic of the tokens against numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from trimtab.diagnosis.measure.bins import plane
from trimtab.diagnosis.tokens import TokenTable
from trimtab.report import token_statistics

# Two responses of 4 and 1 tokens, an empty one, and one of 10.
STARTS = np.array([0, 4, 5, 5, 15])


def test_tenths_of_responses_of_four_one_none_and_ten_tokens() -> None:
    # Of four tokens, number i lies at 10 i / 4 = 0, 2.5, 5, 7.5; a single token opens its response.
    assert TokenTable(STARTS, STARTS, STARTS).decile.tolist() == [0, 2, 5, 7, 0, *range(10)]


def test_mean_by_tenth_is_not_a_number_where_no_token_is() -> None:
    mean = token_statistics.by_decile(np.array([0, 0, 2, 9]), np.array([1.0, 3.0, 5.0, 7.0]))
    assert mean[[0, 2, 9]].tolist() == [2.0, 5.0, 7.0]
    assert np.isnan(mean[[1, 3, 4, 5, 6, 7, 8]]).all()


def test_envelope_has_the_quantiles_of_each_bin_and_leaves_out_thin_ones() -> None:
    # 101 tokens at p = 0.8 with log-ratios 0, 0.01, ... 1: the quantiles are the values. 20 at p = 0.3, all -0.5.
    # 19 at p = 1e-3 are too few.
    behavior = np.log(np.concatenate([np.full(101, 0.8), np.full(20, 0.3), np.full(19, 1e-3)]))
    ratio = np.concatenate([np.linspace(0, 1, 101), np.full(20, -0.5), np.full(19, 9.0)])
    shuffled = np.random.default_rng(0).permutation(140)
    result = token_statistics.envelope(behavior[shuffled], ratio[shuffled])
    # Three bins in a factor of ten: 0.8 lies in (0.464, 1], 0.3 in (0.215, 0.464].
    assert result.probability == pytest.approx([10**-0.5, 10 ** (-1 / 6)])
    assert result.low == pytest.approx([-0.5, 0.02])
    assert result.median == pytest.approx([-0.5, 0.5])
    assert result.high == pytest.approx([-0.5, 0.98])
    assert result.count.tolist() == [20, 101]
    assert result.thin == 19


def test_envelope_takes_certain_and_impossible_tokens() -> None:
    # A sampler may report a hair above 0, and 1e-30 lies far below the last bin.
    behavior = np.concatenate([np.full(20, 1e-7), np.full(20, -70.0)]).astype(np.float32)
    result = token_statistics.envelope(behavior, np.arange(40.0))
    assert result.probability == pytest.approx([10 ** (-14.5 / 3), 10 ** (-1 / 6)])
    assert result.count.tolist() == [20, 20]


def test_envelope_of_few_tokens_is_empty() -> None:
    result = token_statistics.envelope(np.full(19, -0.1), np.zeros(19))
    assert len(result.probability) == 0
    assert result.thin == 19


def test_pearson_by_hand() -> None:
    # Deviations (-1, 0, 1) and (-1, 1, 0): 1 / sqrt(2 * 2).
    assert token_statistics.pearson(np.array([1.0, 2.0, 3.0]), np.array([1.0, 3.0, 2.0])) == pytest.approx(0.5)
    assert token_statistics.pearson(np.array([0.0, 1.0]), np.array([5.0, 3.0])) == pytest.approx(-1.0)


def test_pearson_is_that_of_numpy_in_float32_data() -> None:
    rng = np.random.default_rng(0)
    x = rng.random(1000).astype(np.float32)
    y = x + 0.01 * rng.random(1000).astype(np.float32)
    assert token_statistics.pearson(x, y) == pytest.approx(
        np.corrcoef(x.astype(float), y.astype(float))[0, 1], abs=1e-12
    )


@pytest.mark.parametrize("x", [[0.3, 0.3, 0.3], [0.1] * 20, [0.3], []])
def test_pearson_of_what_does_not_vary_is_not_a_number(x: list[float]) -> None:
    assert math.isnan(token_statistics.pearson(np.array(x), np.arange(float(len(x)))))
    assert math.isnan(token_statistics.pearson(np.array(x), np.array(x)))


def test_plane_counts_points_with_rows_along_y() -> None:
    counts = plane(np.array([0.1, 0.9, 1.0, 0.1]), np.array([0.6, 0.2, 1.0, 0.7]), 2)
    assert counts.tolist() == [[0, 1], [2, 1]]


def test_shift_counts_magnitudes_and_takes_the_quartile_over_all_tokens() -> None:
    clean = np.array([0.5, 0.5, 0.5, 0.5, 0.5])
    moved = clean + np.array([0.0, 0.001, -0.01, 0.1, 0.0])
    shift = token_statistics.shift(moved, clean, bins=2)
    # 0.001 to 0.1 in two bins: they meet at 0.01, which rounding puts on either side.
    assert shift.edges == pytest.approx([0.001, 0.01, 0.1])
    assert shift.count.sum() == 3
    assert shift.count[0] >= 1 <= shift.count[1]
    assert shift.unmoved == pytest.approx(0.4)
    # Sorted 0, 0, 0.001, 0.01, 0.1: the quartile is the fourth.
    assert shift.upper_quartile == pytest.approx(0.01)


def test_shift_of_equal_magnitudes_loses_none() -> None:
    shift = token_statistics.shift(np.full(7, 0.75), np.full(7, 0.5))
    assert shift.count.sum() == 7
    assert shift.upper_quartile == 0.25


def test_shift_of_nothing_has_no_bins() -> None:
    shift = token_statistics.shift(np.full(3, 0.5), np.full(3, 0.5))
    assert len(shift.count) == 0
    assert (shift.unmoved, shift.upper_quartile) == (1.0, 0.0)


def test_clipping_acts_on_the_harmful_side_alone() -> None:
    ratio = np.log([0.7, 0.7, 0.9, 1.2, 1.4, 1.4, 0.7, 1.4])
    advantage = np.array([-1.0, 1.0, -1.0, 1.0, 1.0, -1.0, 0.0, 0.0])
    low, high = token_statistics.clipped(ratio, advantage, 0.8, 1.28)
    assert low.tolist() == [True, False, False, False, False, False, False, False]
    assert high.tolist() == [False, False, False, False, True, False, False, False]


def test_a_lower_bound_of_zero_clips_nothing_below() -> None:
    low, _ = token_statistics.clipped(np.array([-1e3]), np.array([-1.0]), 0.0, 2.0)
    assert not low.any()


def test_levels_of_the_ratio() -> None:
    own = np.array([0.1, 0.2, 9.0, 0.3, 0.5, *([0.0] * 10)])
    trained = np.array([True, True, False, True, True, *([True] * 10)])
    assert token_statistics.at_level(own, trained, STARTS, "token") is own
    assert token_statistics.at_level(own, trained, STARTS, "sequence")[:5] == pytest.approx([0.6] * 4 + [0.5])
    assert token_statistics.at_level(own, trained, STARTS, "geometric")[:5] == pytest.approx([0.2] * 4 + [0.5])


def test_cuts_are_rises_inside_a_response() -> None:
    #                    old old new new | new | | falls and rises: only the rises count
    version = np.array([3, 3, 5, 5, 7, 2, 2, 2, 1, 1, 4, 4, 6, 6, 6])
    assert token_statistics.takeovers(version, STARTS).tolist() == [2, 10, 12]
    assert token_statistics.takeovers(np.full(15, 3), STARTS).tolist() == []


def test_frequent_tokens_with_their_entropy_ties_by_id() -> None:
    ids, entropy = np.array([9, 2, 9, 5, 2, 7]), np.array([1.0, 0.5, 3.0, 0.25, 0.7, 0.0])
    assert token_statistics.most_frequent(ids, entropy, 3) == [
        token_statistics.Frequent(2, 2, 0.6),
        token_statistics.Frequent(9, 2, 2.0),
        token_statistics.Frequent(5, 1, 0.25),
    ]
    assert [row.count for row in token_statistics.most_frequent(ids, None, 9)] == [2, 2, 1, 1]
    assert math.isnan(token_statistics.most_frequent(ids, None, 1)[0].entropy)
