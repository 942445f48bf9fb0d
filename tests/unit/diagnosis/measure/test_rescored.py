"""The side that a rescored column accuses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from trimtab.diagnosis.measure.one_pass import rescored_sides
from trimtab.diagnosis.tokens import TokenTable


@pytest.mark.parametrize(
    ("sampler", "trainer", "shared", "side"),
    [
        (0.5, 0.03, 0.0, "sampler"),
        (0.03, 0.5, 0.0, "trainer"),
        (0.5, 0.5, 0.0, "both"),
        (0.03, 0.04, 0.0, "neither"),
        (0.05, 0.001, 0.0, "sampler"),  # beyond 16 bits, and on one side only
        (0.03, 0.001, 0.0, "neither"),  # within them, if on one side only
        (0.1, 0.1, 1.0, "other"),
    ],
)
def test_the_side_that_differs_from_the_rescored_column(
    sampler: float, trainer: float, shared: float, side: str
) -> None:
    """Gaussian differences, of which k3 is about half the square, from a column that both may be far from."""
    rng = np.random.default_rng(0)
    rescored = (-3 - rng.random(3000)).astype(np.float32)
    away = shared * rng.normal(size=3000)
    behavior, proximal = (rescored + away + spread * rng.normal(size=3000) for spread in (sampler, trainer))
    table = TokenTable(
        starts=np.arange(0, 3001, 30),
        mask=np.ones(3000, dtype=np.bool_),
        behavior=behavior.astype(np.float32),
        proximal=proximal.astype(np.float32),
        rescored=rescored,
    )
    found = rescored_sides(table)
    assert ("other" if found.is_other_model else found.side) == side
    if not shared:
        assert found.sampler.value == pytest.approx(sampler**2 / 2, rel=0.3)
        assert found.trainer.low < found.trainer.value < found.trainer.high
    assert rescored_sides(replace(table, rescored=None)) is None
