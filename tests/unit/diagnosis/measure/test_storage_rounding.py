"""Grids that log-probs were stored on, planted and found, and the k3 they cost."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trimtab.diagnosis.measure.size import RoundingDetector, rounding_floor


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
    assert "logp_behavior is stored in bfloat16 and logp_proximal is stored in float32" in note
    both = rounding_floor({"a": columns["logp_behavior"], "b": columns["logp_behavior"]})
    assert both[0] == pytest.approx(2 * value)
