"""What is common to all views, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from tests.support.token_tables import table, trained

from trimtab.diagnosis.measure.trained_tokens import FIELDS, hash_index, plane


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
    expected = {
        "tokens": (2, 1),
        "log": (0, math.log(4)),
        "log_square": (2 * math.log(2) ** 2, math.log(4) ** 2),
        "log_abs": (2 * math.log(2), math.log(4)),
        "excess": (0.5, 3),
        "excess_square": (1.25, 9),
        "k3": (0.5, 3 - math.log(4)),
        "p": (0.75, 1),
        "q": (0.75, 0.25),
        "p_square": (0.3125, 1),
        "q_square": (0.3125, 0.0625),
        "p_q": (0.25, 0.25),
        "sequences": (1, 1),
        "product": (1, 4),
        "product_square": (1, 16),
        "ppl_ratio": (1, 0.25),
        "ppl_train": (8**0.5, 1),
    }
    assert dict(zip(FIELDS, metrics.sums.T.tolist(), strict=True)) == {
        name: pytest.approx(values, rel=1e-6, abs=1e-6) for name, values in expected.items()
    }
    log2 = math.log(2)  # extremes of the trained tokens, ratios 2 and 1/2, and 4 alone
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
    turns = trained(data).turns
    assert turns.number.tolist() == [0, 0, 1, 1, 1, 0, 0]
    assert turns.after[2:5].tolist() == [0, 1, 2]
    assert turns.before[:2].tolist() == [-2, -1]
    assert (np.delete(turns.after, [2, 3, 4]) > 1e9).all()
    assert (turns.before[2:] < -1e9).all()


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
