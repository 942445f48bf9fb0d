"""Bounds from quantiles: hand numbers, small samples, the range they are held in, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import trimtab
from trimtab.errors import TrimtabError
from trimtab.objectives import Band, Veto, Weight, correct, objectives
from trimtab.objectives.calibrate import SAMPLES_MIN, Observed, bounds_of, calibrated
from trimtab.objectives.lookup import from_section

PUBLISHED = {name: bounds_of(name) for name in objectives() if bounds_of(name)}


def observed(log: torch.Tensor, mask: torch.Tensor | None = None) -> Observed:
    """Log-ratios (batch, time) as log-probs of the trainer over a sampler that reported 0."""
    full = torch.ones_like(log, dtype=torch.bool) if mask is None else mask
    return Observed.of(log, torch.zeros_like(log), full, turn=turns(log))


def turns(log: torch.Tensor) -> torch.Tensor:
    """The first half of each response is one turn, the second half another."""
    return (torch.arange(log.shape[1]) >= log.shape[1] // 2).long().expand(log.shape)


def noise(rows: int, time: int, size: float, seed: int = 0) -> torch.Tensor:
    return size * torch.randn(rows, time, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_a_mask_leaves_one_response_in_a_hundred_on_either_side() -> None:
    # 1000 responses of two tokens whose mean log-ratio is (i - 500) / 1000, i = 0 ... 999; so ten lie beyond each.
    mean = (torch.arange(1000, dtype=torch.float64) - 500) / 1000
    log = torch.stack([mean + 1, mean - 1], dim=1)
    result = calibrated("geo-mask", observed(log))
    assert result == {"keep_min": 0.612626, "keep_max": 1.63069}  # exp(-.490), exp(.489), rounded outwards
    drift = calibrated("opsm", observed(log))
    assert drift == {"delta": 0.49}


def test_a_token_mask_leaves_one_token_in_a_thousand() -> None:
    log = (torch.arange(10_000, dtype=torch.float64) - 5000).reshape(100, 100) / 5000
    # Ten tokens beyond each side: log-ratios below -.998 and above .9978, then within [1/10, 10].
    assert calibrated("icepop", observed(log)) == {"weight_min": 0.368615, "weight_max": 2.71231}


def test_a_sequence_bound_is_of_the_product_and_masked_tokens_count_for_nothing() -> None:
    log = torch.zeros(100, 3, dtype=torch.float64)
    log[:, 0] = torch.linspace(0.0, 0.99, 100)
    log[:, 1] = 0.5
    log[:, 2] = 1e6
    mask = torch.ones(100, 3, dtype=torch.bool)
    mask[:, 2] = False
    product = math.exp(0.5 + 0.98)  # one of a hundred beyond
    normal = math.exp(0.5 + 0.49 + (0.94 - 0.49) * 2.3263478740 / 1.6448536270)  # carried outwards from five beyond
    result = calibrated("seq-mis", observed(log, mask))["weight_max"]
    assert result == pytest.approx(max(product, normal), rel=1e-5)
    assert result >= normal > product


def test_bounds_from_few_samples_are_extrapolated_with_a_normal_tail() -> None:
    log = noise(77, 1, 0.02, seed=1)
    result = calibrated("geo-mask", observed(log))
    ordered = log[:, 0].sort().values
    center = float(log.median())
    # Five of 77 lie beyond the 72nd; z(.01) / z(5 / 77) = 2.3263 / 1.5146.
    expected = math.exp(center + (float(ordered[71]) - center) * 2.3263478740 / 1.5146142163)
    assert result["keep_max"] == pytest.approx(max(expected, math.exp(float(ordered[76]))), rel=1e-5)
    # A heavy tail beyond the normal one: nothing of what was seen is thrown away.
    log[0] = 0.4
    assert calibrated("geo-mask", observed(log))["keep_max"] == pytest.approx(math.exp(0.4), rel=1e-5)


def test_bounds_stay_within_what_published_ones_span() -> None:
    same = observed(torch.zeros(64, 8, dtype=torch.float64))
    assert calibrated("geo-mask", same) == {"keep_min": 0.999, "keep_max": 1.00101}
    assert calibrated("icepop", same) == {"weight_min": 0.95238, "weight_max": 1.05}
    assert calibrated("token-tis", same) == {"weight_max": 1.5}
    assert calibrated("seq-tis", same) == {"weight_max": 2.0}
    assert calibrated("k3-mask", same) == {"divergence_max": 1e-5}
    assert calibrated("opsm", same) == {"delta": 1e-3}
    far = observed(noise(64, 8, 9.0))
    assert calibrated("geo-mask-token-tis", far) == {
        "weight_min": 0.2,
        "weight_max": 5.0,
        "keep_min": 0.60653,
        "keep_max": 1.64873,
    }
    assert calibrated("seq-mis", far) == {"weight_max": 10.0}
    assert calibrated("k3-mask", far) == {"divergence_max": 0.1}
    assert calibrated("opsm", far) == {"delta": 0.5}


def test_responses_that_all_drifted_alike_are_all_kept() -> None:
    # The quantile is the common value itself: rounding must not put the bound below it.
    log = torch.full((200, 4), 0.0201234567)
    bounds = calibrated("geo-mask", observed(log))
    built = trimtab.objective("geo-mask", **bounds)
    kept = correct(log, torch.zeros_like(log), torch.ones_like(log, dtype=torch.bool), masks=built.masks).keep
    assert kept.all()


@pytest.mark.parametrize("preset", PUBLISHED)
@settings(max_examples=4, deadline=None)
@given(
    rows=st.integers(SAMPLES_MIN, 300),
    time=st.integers(1, 12),
    size=st.floats(0.0, 2.0),
    seed=st.integers(0, 99),
    cut=st.integers(1, SAMPLES_MIN - 1),
)
def test_the_preset_takes_its_bounds_and_keeps_its_share(
    preset: str, rows: int, time: int, size: float, seed: int, cut: int
) -> None:
    log = noise(rows, time, size, seed)
    whole = observed(log)
    bounds = calibrated(preset, whole)
    assert tuple(bounds) == PUBLISHED[preset]
    built = trimtab.objective(preset, **bounds)
    assert calibrated(preset, observed(log[:cut]) + observed(log[cut:])) == bounds
    assert calibrated(preset, observed(log[torch.randperm(rows)])) == bounds
    fields = {"current": log, "advantage": -torch.ones(rows, 1, dtype=torch.float64), "turn": turns(log)}
    every = torch.ones_like(log, dtype=torch.bool)
    correction = correct(log, torch.zeros_like(log), every, weight=built.weight, masks=built.masks, **fields)
    # Where a bound was held back from its quantile it may reject more; elsewhere at most 1% on either side.
    at_the_limit = {10.0, 0.1, 0.5, 1.64873, 0.60653, 5.0, 0.2} & set(bounds.values())
    if not at_the_limit:
        assert correction.keep.float().mean() >= 0.98 - 1e-9


def test_packed_rows_give_the_same_bounds_as_rows() -> None:
    log = noise(64, 6, 0.1)
    ids = torch.arange(64).repeat_interleave(6)[None]
    packed = Observed.of(
        log.reshape(1, -1), torch.zeros(1, 384, dtype=torch.float64), torch.ones(1, 384, dtype=torch.bool), ids
    )
    assert calibrated("geo-mask-token-tis", packed) == calibrated("geo-mask-token-tis", observed(log))


def test_what_cannot_be_calibrated_is_refused_in_one_line() -> None:
    with pytest.raises(TrimtabError, match=r"^objective 'seq-bypass' has no bound that calibrate"):
        calibrated("seq-bypass", observed(noise(64, 4, 0.1)))
    with pytest.raises(TrimtabError, match=r"^calibrate: 19 responses are too few for keep_min, it needs 20"):
        calibrated("geo-mask", observed(noise(19, 4, 0.1)))
    assert calibrated("token-tis", observed(noise(19, 4, 0.1)))  # 76 tokens are enough for a bound on tokens
    bad = noise(64, 4, 0.1)
    bad[3, 1] = torch.nan
    with pytest.raises(TrimtabError, match="not finite"):
        calibrated("geo-mask", observed(bad))


def test_a_section_builds_its_objective_and_says_where_its_bounds_come_from() -> None:
    section = {"name": "geo-mask", "calibrate": True, "clip_high": 0.28}
    waiting = from_section(section)
    assert "0.99 ≤ ρ_geo ≤ 1.01" in waiting.equation()
    assert "keep_min, keep_max: to be calibrated at step 0; the published values stand here" in waiting.equation()
    result = from_section(section, {"keep_min": 0.9, "keep_max": 1.2})
    assert "clip(r_t, 0.8, 1.28)" in result.equation()
    assert "0.9 ≤ ρ_geo ≤ 1.2" in result.equation()
    assert "note: keep_min, keep_max: calibrated at step 0" in result.equation()
    assert from_section({"name": "grpo", "calibrate": False}) == trimtab.objective("grpo")


OPSM_MASK = {"kind": "opsm", "delta": 0.1}
K3_MASK = {"kind": "k3", "reduce": "mean", "max": 0.1}


@pytest.mark.parametrize(
    ("name", "given", "line"),
    [
        ("grpo", {}, "objective 'grpo' has no bound that calibrate can find: leave calibr"),
        ("icepop", {"weight_max": 3.0}, "objective.calibrate finds weight_min, weight_max at step 0: leave weight_max"),
        ("icepop", {"calibrate": "yes"}, "objective.calibrate = 'yes' has the wrong type: use true or false"),
        ("icepopp", {}, "unknown objective 'icepopp'"),
        ("icepop", {"clip": 1.0}, "objective 'icepop' has no keyword 'clip'"),
        # Parts: refused before the run, not by their bounds at step 0.
        (
            "composed",
            {"surrogate": {"kind": "clipped"}, "weight": {}},
            "objective 'composed' has no bound that calibra",
        ),
        ("seq-tis", {"weight": {"level": "geometric"}}, "objective.calibrate finds the bounds of the weight of"),
        ("opsm", {"mask": [OPSM_MASK]}, "objective.calibrate finds the bounds of opsm, and a mask gives others"),
        ("k3-mask", {"mask": [K3_MASK]}, "objective.calibrate finds the bounds of k3_mean, and a mask gives others"),
    ],
)
def test_an_invalid_section_is_refused(name: str, given: dict[str, object], line: str) -> None:
    with pytest.raises(TrimtabError) as refused:
        from_section({"name": name, "calibrate": True, **given})
    assert str(refused.value).startswith(line)
    assert "\n" not in str(refused.value)


def test_parts_beside_what_is_calibrated_keep_their_own_bounds() -> None:
    veto = {"kind": "veto", "min": 1e-3}
    section = {"name": "geo-mask", "calibrate": True, "mask": [veto], "weight": {"max": 3.0}}
    assert from_section(section) == replace(
        trimtab.objective("geo-mask", mask=[veto], weight={"max": 3.0}), notes=from_section(section).notes
    )
    result = from_section(section, {"keep_min": 0.9, "keep_max": 1.2})
    assert result.masks == (Band("geometric", 0.9, 1.2), Veto(1e-3))
    assert result.weight == Weight(max=3.0)
    assert bounds_of("composed") == ()
