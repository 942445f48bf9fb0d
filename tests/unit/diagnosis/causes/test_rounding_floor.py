"""Below what two float32 forwards differ by nothing is named, however systematic it looks; above it, it is."""

from __future__ import annotations

import numpy as np
import pytest
from tests.support.planted_causes import causes

from trimtab.diagnosis.tokens import TokenTable

TOKENS, LENGTH, IDS = 6000, 60, 300


def same_wherever_it_stands(size: float, **columns: np.ndarray) -> TokenTable:
    """Logits off by an amount of each token id's own: what other weights do, at any size."""
    random = np.random.default_rng(0)
    ids = random.integers(0, IDS, TOKENS)
    behavior = np.log(random.uniform(0.05, 0.95, TOKENS))
    logit = behavior - np.log1p(-np.exp(behavior)) + size * random.standard_normal(IDS)[ids]
    return TokenTable(
        starts=np.arange(0, TOKENS + 1, LENGTH),
        mask=np.ones(TOKENS, dtype=bool),
        behavior=behavior,  # float64: the shift is as small as float32's own grid
        proximal=-np.log1p(np.exp(-logit)),
        ids=ids,
        **columns,
    )


@pytest.mark.parametrize(("size", "anything"), [(3e-5, False), (0.03, True)])
def test_a_token_that_is_always_off_alike(size: float, anything: bool) -> None:
    assert bool(causes(same_wherever_it_stands(size))) == anything


@pytest.mark.parametrize(("size", "named"), [(1e-5, set()), (0.05, {"stale"})])
def test_old_tokens_that_are_off_beside_exact_ones(size: float, named: set[str]) -> None:
    old = np.repeat(np.arange(TOKENS // LENGTH) % 2 == 1, LENGTH)
    version = np.where(old, 4, 9)
    proximal_version = np.full(TOKENS // LENGTH, 9)
    data = same_wherever_it_stands(size, version=version, proximal_version=proximal_version)
    assert data.proximal is not None
    data.proximal[~old] = data.behavior[~old]
    found = causes(data)
    assert {cause.name for cause in found} == named
    for cause in found:
        assert "over 100 times" in cause.evidence
