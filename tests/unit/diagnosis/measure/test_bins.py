"""Bins: edges by hand, quantiles against numpy's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.diagnosis.measure import bins


def test_octaves_are_cut_into_32_equal_bins() -> None:
    values = np.array([1.0, 1.03, 1.03125, 1.99, 2.0, 3.0, 0.5], dtype=np.float32)
    assert bins.octave(values, 0).tolist() == [0, 0, 1, 31, 32, 48, -32]
    edges = bins.octave_edges(0, 64)
    assert edges[[0, 1, 31, 32, 48, 64]].tolist() == [1.0, 1.03125, 1.96875, 2.0, 3.0, 4.0]


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
