"""Rows by key merge like the whole, in any order, and never outgrow their bound."""

from __future__ import annotations

import numpy as np

from trimtab.diagnosis.measure.trained_tokens import LOG_RATIO_BINS, KeyedSums


def filled(most: int, steps: list[int], tables: int = 1, other: int = 0) -> KeyedSums:
    """One token of log-ratio bin `step` for each step, sums 1, largest value the step."""
    ledger = KeyedSums(most)
    for part in np.array_split(np.array(steps), tables):
        keys = np.column_stack([part, np.full(len(part), other)])
        ledger.add(keys, np.ones((len(part), 1)), part[:, None].astype(float), (np.arange(len(part)), part))
    return ledger


def test_equal_keys_merge() -> None:
    ledger = filled(10, [3, 1, 3, 3], tables=2)
    (first, one), (second, three) = ledger.rows()
    assert (first, second) == ((1, 0), (3, 0))
    assert (one[0][0], three[0][0]) == (1, 3)
    assert three[1][0] == 3
    assert three[2][3] == 3
    assert three[2].sum() == 3
    assert len(three[2]) == LOG_RATIO_BINS


def test_neighbors_merge_until_they_fit() -> None:
    # 9 steps do not fit into 4 rows by twos (5 blocks), but by fours: 0-3, 4-7, 8.
    for tables in (1, 2, 9):
        ledger = filled(4, list(range(9)), tables)
        assert ledger.width == 4
        assert [(key[0], row[0][0], row[1][0]) for key, row in ledger.rows()] == [(0, 4, 3), (1, 4, 7), (2, 1, 8)]


def test_order_of_steps_changes_nothing() -> None:
    steps = np.random.default_rng(0).permutation(500).tolist()
    shuffled, ordered = filled(60, steps, 7), filled(60, sorted(steps), 3)
    assert shuffled.width == ordered.width == 16
    for (key, row), (other_key, other) in zip(shuffled.rows(), ordered.rows(), strict=True):
        assert key == other_key
        assert row[0] == other[0]
        assert np.array_equal(row[2], other[2])
