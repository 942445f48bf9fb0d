"""Bins of about equally many responses, and the length bias of rules by hand and planted."""

from __future__ import annotations

import math

import numpy as np
import pytest
from tests.support.token_tables import table, whole

from trimtab.diagnosis.measure.by_length import rejected


def test_rules_reject_by_hand() -> None:
    # Drift of +0.005 over 100 tokens (product 1.65, mean 1.005), of -0.02 over 50 (product .37, mean .98), of +0.01 + a
    # bit over 100 (product 2.8, mean 1.0105), of 0.06 downwards over 2, and a mean k3 above its bound.
    length = np.array([100, 50, 100, 2, 10])
    log = np.array([0.5, -1.0, 1.0445, -0.12, 0.0])
    k3 = np.array([0.001, 0.01, 0.005, 0.0036, 0.11])
    assert {rule: gone.tolist() for rule, gone in rejected(log, length, k3).items()} == {
        "sequence [0.5, 2]": [False, True, True, False, False],
        "sequence [0.5, 3]": [False, True, False, False, False],
        "geometric [0.99, 1.01]": [False, True, True, True, False],
        "geometric [0.99, 1.001]": [True, True, True, True, False],
        "mean k3 <= 0.01": [False, False, False, False, True],
        "opsm 0.05": [False, False, False, True, False],
    }


def test_each_length_is_a_bin_when_there_are_few() -> None:
    # The untrained token does not count as length; the response without a trained one is no response.
    ratios = [[0.8], [0.0, 0.0, 0.0], [math.log(2.5), 0.0, 0.0, 1.0], [0.0]]
    mask = [[True], [True, True, True], [True, True, True, False], [False]]
    view = whole(table(ratios, mask=mask)).views["length"]
    assert view.labels == ("1-2", "3")
    assert view.count.tolist() == [1, 6]
    assert view.edges is not None
    assert view.edges.tolist() == [1, 3, 4]
    assert view.columns["responses"].tolist() == [1, 2]
    assert view.columns["rejected/sequence [0.5, 2]"].tolist() == [1.0, 0.5]
    assert view.columns["rejected/sequence [0.5, 3]"].tolist() == [0.0, 0.0]
    assert view.columns["rejected/geometric [0.99, 1.01]"].tolist() == [1.0, 0.5]


def test_ten_bins_share_responses_evenly() -> None:
    lengths = np.random.default_rng(0).integers(1, 300, 1000)
    view = whole(table([[0.0] * length for length in lengths])).views["length"]
    assert len(view.labels) == 10
    assert view.columns["responses"].sum() == 1000
    # A fine bin is at most 1/32 of its length wide.
    assert view.columns["responses"].min() > 70
    assert view.columns["responses"].max() < 130
    assert view.edges is not None
    inside = [
        ((lengths >= low) & (lengths < high)).sum() for low, high in zip(view.edges[:-1], view.edges[1:], strict=True)
    ]
    assert view.columns["responses"].tolist() == inside


def test_planted_drift_rejects_long_responses_by_product_and_not_by_mean() -> None:
    # The same drift of 0.2% a token everywhere: the product leaves [.5, 2] after 347 tokens.
    lengths = np.tile([50, 100, 200, 300, 500, 900], 20)
    view = whole(table([[0.002] * length for length in lengths])).views["length"]
    assert view.columns["rejected/sequence [0.5, 2]"].tolist() == [0, 0, 0, 0, 1, 1]
    assert view.columns["rejected/geometric [0.99, 1.01]"].tolist() == [0] * 6
    assert view.columns["rejected/geometric [0.99, 1.001]"].tolist() == [1] * 6
    assert view.k3 == pytest.approx(np.full(6, view.k3[0]))
