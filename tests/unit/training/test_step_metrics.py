"""The numbers of one step."""

from __future__ import annotations

import pytest

from trimtab.training.step_metrics import update_metrics
from trimtab.training.step_statistics import StepStatistics


def test_updates_above_the_bound_are_counted() -> None:
    stats = StepStatistics(grad_norms=[0.5, 2.0, 1.0, 6.5])
    found = update_metrics(stats, mismatch_policy="current", grad_clip=1.0)
    assert found["optim/grad_norm"] == pytest.approx(2.5)
    assert found["optim/grad_clipped"] == 0.5, "2 and 6.5; a norm equal to the bound stays as it is"
    assert "optim/grad_clipped" not in update_metrics(StepStatistics(), mismatch_policy="current", grad_clip=1.0)
