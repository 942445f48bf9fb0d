"""Log-probs that no sampled token has: they count as not finite, and are never data."""

from __future__ import annotations

import math

import pytest
import torch

import trimtab

ONES = torch.ones(2, 2, dtype=torch.bool)
TRAINER = torch.tensor([[-1.0, -0.5], [-2.0, -1.5]])


@pytest.mark.parametrize("value", [-9999.0, -6e8, -math.inf, math.nan])
def test_mismatch_is_nan_never_negative(value: float) -> None:
    behavior = TRAINER.clone()
    behavior[1, 0] = value
    assert math.isnan(trimtab.mismatch(TRAINER, behavior, ONES).finalize()["k3"])
    untrained = ONES.clone()
    untrained[1, 0] = False
    assert trimtab.mismatch(TRAINER, behavior, untrained).finalize()["k3"] == 0


@pytest.mark.parametrize("name", ["token-tis", "seq-tis", "token-bypass", "icepop"])
def test_no_preset_trains_on_it(name: str) -> None:
    behavior = TRAINER.clone()
    behavior[0, 1] = -9999.0
    logps = trimtab.PolicyLogps(current=TRAINER, behavior=behavior, mask=ONES, proximal=TRAINER)
    assert trimtab.objective(name)(logps, torch.ones(2, 1)).loss.isnan()
    behavior[0, 1] = -99.0
    assert trimtab.objective(name)(logps, torch.ones(2, 1)).loss.isfinite()
