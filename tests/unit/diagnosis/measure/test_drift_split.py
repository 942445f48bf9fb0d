"""Total drift split into mismatch and staleness."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.support.token_tables import noisy, table, whole

from trimtab.diagnosis.records import DriftSplit
from trimtab.diagnosis.tokens import TokenTable


def planted(seed: int, mismatch: float, staleness: float, fresh: float, biased: bool = False) -> TokenTable:
    """Tokens whose log-ratio is the sum of two independent ones of mean ratio 1, the second only at age 5.

    biased: mismatch grows with -log p, and three quarters of the old tokens are rare but one quarter of the others.
    """
    rng = np.random.default_rng(seed)
    shape = (400, 60)
    old = np.repeat(rng.random(400) >= fresh, 60).reshape(shape)
    rare = rng.random(shape) < np.where(old, 0.75, 0.25)
    behavior = -rng.exponential(1.0, shape) * (np.where(rare, 2.0, 0.2) if biased else 1.0)
    scale = mismatch * np.sqrt(-behavior) if biased else np.full(shape, mismatch)
    stale = np.where(old, staleness, 0.0)
    ratio = (scale * rng.standard_normal(shape) - scale**2 / 2) + (stale * rng.standard_normal(shape) - stale**2 / 2)
    version = np.where(old, 5, 10)
    return table(
        ratio.tolist(), behavior=behavior.tolist(), version=version.tolist(), proximal_version=np.full(400, 10)
    )


def split(data: TokenTable) -> DriftSplit:
    return whole(data).split


def test_split_finds_planted_parts() -> None:
    # Independent normal log-ratios: k3 is half the variance of each, staleness counts at half of the tokens only.
    data = planted(0, mismatch=0.1, staleness=0.2, fresh=0.5)
    result, old = split(data), (data.version == 5).mean()
    assert result.separable
    assert result.mismatch == pytest.approx(0.005, rel=0.05)
    assert result.staleness == pytest.approx(old * 0.02, rel=0.1)
    assert result.intervals["variance_mismatch"].value == pytest.approx(0.01, rel=0.05)
    assert result.intervals["variance_staleness"].value == pytest.approx(old * 0.04, rel=0.1)
    for key, truth in (("mismatch", 0.005), ("staleness", old * 0.02)):
        assert result.intervals[key].low < truth < result.intervals[key].high


def test_parts_add_up_to_the_whole() -> None:
    data = planted(1, mismatch=0.1, staleness=0.3, fresh=0.3, biased=True)
    result = whole(data)
    assert result.split.mismatch is not None
    assert result.split.staleness is not None
    assert result.split.mismatch + result.split.staleness == pytest.approx(result.size.mismatch["k3"], rel=1e-9)


def test_rare_old_tokens_are_not_mistaken_for_staleness() -> None:
    # Old tokens mismatch more than twice as much, only because they are rarer.
    data = planted(2, mismatch=0.1, staleness=0.0, fresh=0.5, biased=True)
    view = whole(data).views["version"]
    assert view.k3[1] > 2.0 * view.k3[0]
    result = split(data)
    assert result.mismatch is not None
    assert result.staleness is not None
    assert abs(result.staleness) < 0.05 * result.mismatch
    assert result.intervals["staleness"].low < 0 < result.intervals["staleness"].high


def test_old_tokens_without_fresh_ones_like_them_are_not_split() -> None:
    data = planted(2, mismatch=0.1, staleness=0.0, fresh=0.5)
    assert data.version is not None
    far = np.where(data.version == 5, 5.0, 1.0).astype(np.float32)
    result = split(replace(data, behavior=data.behavior * far, proximal=data.trainer + data.behavior * (far - 1)))
    assert not result.separable
    assert "lies at behavior probabilities with fewer than 100 tokens of age 0" in result.why


def test_all_of_age_zero_is_mismatch_alone() -> None:
    result = split(planted(3, mismatch=0.1, staleness=0.0, fresh=1.0))
    assert result.separable
    assert "every token is of age 0" in result.why


@pytest.mark.parametrize(("seed", "responses"), [(0, 30), (2, 100), (4, 100)])
def test_all_of_age_zero_has_no_staleness_at_all(seed: int, responses: int) -> None:
    # Not even a rounding error, which the verdict would print as a figure.
    data = noisy(seed, responses)
    assert data.proximal_version is not None
    assert split(replace(data, version=np.repeat(data.proximal_version, np.diff(data.starts)))).staleness == 0.0


def test_missing_columns_are_named() -> None:
    data = planted(4, mismatch=0.1, staleness=0.1, fresh=0.0)
    result = split(data)
    assert not result.separable
    assert "0 tokens are of age 0 (the youngest is 5 updates old)" in result.why
    assert "no proximal_version" in split(replace(data, proximal_version=None)).why
    assert "no policy_version" in split(replace(data, version=None)).why
    assert data.version is not None
    newer = split(replace(data, version=data.version + 6))
    assert not newer.separable
    assert "newer than proximal_version" in newer.why
    few = split(noisy(0, 3))
    assert not few.separable
    assert few.mismatch is None
