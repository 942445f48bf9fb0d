"""The table of presets: hand numbers, and the same answer as the correction the trainer applies."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.support import token_tables

import trimtab
from trimtab.diagnosis.advice.preset_outcomes import AdviceData, rate_presets, weights
from trimtab.diagnosis.records import PresetOutcome
from trimtab.diagnosis.tokens import TokenTable
from trimtab.objectives import correct, objectives
from trimtab.objectives.calibrate import bounds_of

RATIOS = [[1.0, 1.1, 0.9], [4.0, 1.0], [0.4, 0.5, 1.0, 1.0]]
"""Three responses of 3, 2 and 4 tokens; products .99, 4 and .2."""


def table(ratios: list[list[float]], advantage: list[float] | None = None) -> TokenTable:
    columns = {} if advantage is None else {"advantage": advantage}
    return token_tables.table([np.log(row) for row in ratios], behavior=-5.0, **columns)


def noisy(responses: int, size: float, seed: int = 0, *, known: bool = True) -> TokenTable:
    """Responses of 1 to 40 tokens, a third of them masked here and there."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 41, responses)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    behavior = rng.normal(-2.0, 0.5, starts[-1]).astype(np.float32)
    return TokenTable(
        starts=starts,
        mask=rng.random(starts[-1]) < 0.8,
        behavior=behavior,
        current=behavior + rng.normal(-size * size / 2, size, starts[-1]).astype(np.float32),
        advantage=rng.choice([-1.5, 2.0], responses) if known else None,
    )


def published(data: TokenTable, *presets: str) -> dict[str, PresetOutcome]:
    return {row.preset: row for row in rate_presets(AdviceData.of(data), presets) if not row.calibrated}


def test_every_preset_has_a_row_and_those_with_bounds_a_second_one() -> None:
    rows = rate_presets(AdviceData.of(noisy(400, 0.3)))
    assert list(dict.fromkeys(row.preset for row in rows)) == [name for name in objectives() if "centering" not in name]
    assert [row.preset for row in rows if row.calibrated] == [name for name in objectives() if bounds_of(name)]
    for row in rows:
        assert bool(row.overrides) == row.calibrated
        trimtab.objective(row.preset, **row.overrides)  # every row can be used as it stands
        assert 0.0 <= row.kept <= 1.0
        assert 0.0 <= row.changed <= row.kept + 1e-9
        assert 0.0 <= row.ess <= 1.0 + 1e-9
    # And calibrated bounds keep what they promise.
    result = {row.preset: row for row in rows if row.calibrated}
    for name in ("icepop", "geo-mask", "seq-mis", "k3-mask", "opsm"):
        assert result[name].kept >= 0.975, name
    for name in ("token-tis", "seq-tis"):
        assert result[name].kept == 1.0, name
        assert result[name].changed <= 0.02, name


def test_hand_numbers() -> None:
    rows = published(
        table(RATIOS, [1.0, 1.0, 1.0]),
        *("grpo", "token-tis", "icepop", "seq-tis", "seq-mis", "geo-mask", "geo-mask-token-tis"),
    )
    flat = np.concatenate(RATIOS)
    n = len(flat)

    grpo = rows["grpo"]  # the mismatch is ignored: bias is |1 - ratio|
    assert (grpo.kept, grpo.changed, grpo.ess) == (1.0, 0.0, pytest.approx(1.0))
    assert grpo.bias == pytest.approx(np.abs(1 - flat).mean(), rel=1e-5)

    tis = rows["token-tis"]  # the 4 becomes 2
    weight = np.minimum(flat, 2.0)
    assert (tis.kept, tis.changed) == (1.0, pytest.approx(1 / n))
    assert tis.ess == pytest.approx(weight.sum() ** 2 / (n * (weight**2).sum()), rel=1e-5)
    assert tis.bias == pytest.approx(2.0 / n, rel=1e-5)

    icepop = rows["icepop"]  # .4 lies outside [.5, 5], .5 inside
    assert (icepop.kept, icepop.changed) == (pytest.approx(8 / n), 0.0)
    assert icepop.bias == pytest.approx(0.4 / n, rel=1e-5)

    seq = rows["seq-tis"]  # two tokens at 4, held at 2; the others at the product of their response
    weight = np.array([0.99] * 3 + [2.0] * 2 + [0.2] * 4)
    assert (seq.kept, seq.changed) == (1.0, pytest.approx(2 / n))
    assert seq.bias == pytest.approx(2 * 2.0 / n, rel=1e-5)
    assert seq.ess == pytest.approx(weight.sum() ** 2 / (n * (weight**2).sum()), rel=1e-5)

    mis = rows["seq-mis"]  # the response at 4 is gone
    assert (mis.kept, mis.bias) == (pytest.approx(7 / n), pytest.approx(2 * 4.0 / n, rel=1e-5))

    geo = rows["geo-mask"]  # geometric means .997, 2, .669: only the first is within [.99, 1.01]
    assert (geo.kept, geo.ess) == (pytest.approx(3 / n), pytest.approx(3 / n))
    both = rows["geo-mask-token-tis"]
    assert both.kept == pytest.approx(3 / n)
    assert both.changed == 0.0


def test_effects_of_an_unknown_advantage_sign_are_averaged() -> None:
    up = published(table(RATIOS, [1.0, 1.0, 1.0]), "token-bypass")["token-bypass"]
    down = published(table(RATIOS, [-1.0, -1.0, -1.0]), "token-bypass")["token-bypass"]
    unknown = published(table(RATIOS), "token-bypass")["token-bypass"]
    half = published(table(RATIOS, [0.0, 0.0, 0.0]), "token-bypass")["token-bypass"]
    assert up.kept == pytest.approx(8 / 9)  # A > 0 cuts the ratio of 4
    assert down.kept == pytest.approx(7 / 9)  # A < 0 cuts .4 and .5
    assert unknown.kept == half.kept == pytest.approx(7.5 / 9)
    assert unknown.bias == pytest.approx((up.bias + down.bias) / 2)
    assert "sign" in unknown.note
    assert "sign" not in up.note


def test_dual_clip_and_opsm_act_on_negative_advantages_only() -> None:
    data = [[12.0], [1.0], [0.9]]
    rows = published(table(data, [-1.0, -1.0, -1.0]), "seq-bypass", "opsm")
    assert rows["seq-bypass"].kept == pytest.approx(2 / 3)  # 12 is beyond the dual clip of 10
    assert rows["opsm"].kept == pytest.approx(2 / 3)  # drift -log .9 = .105 is beyond .05
    assert published(table(data, [1.0, 1.0, 1.0]), "opsm")["opsm"].kept == 1.0


def test_m2po_cuts_what_exceeds_its_second_moment() -> None:
    # A > 0 judges the tokens above 1. The mean square of log 1.1 and log 4 is far above .04: the 4 is cut.
    row = published(table(RATIOS, [1.0, 1.0, 1.0]), "m2po")["m2po"]
    assert row.kept == pytest.approx(8 / 9)
    assert published(table([[1.1, 1.0, 0.9]], [1.0]), "m2po")["m2po"].kept == 1.0


def test_weights_of_turns_are_products_over_turns() -> None:
    data = replace(table(RATIOS, [1.0, 1.0, 1.0]), turn=np.array([0, 0, 1, 0, 1, 0, 0, 0, 1]))
    row = published(data, "turn-tis")["turn-tis"]
    weight = np.array([1.1, 1.1, 0.9, 2.0, 1.0, 0.2, 0.2, 0.2, 1.0])
    assert (row.kept, row.changed) == (1.0, pytest.approx(1 / 9))
    assert row.ess == pytest.approx(weight.sum() ** 2 / (9 * (weight**2).sum()), rel=1e-5)
    assert row.bias == pytest.approx(2.0 / 9, rel=1e-5)


@pytest.mark.parametrize(
    "preset", ["token-tis", "seq-tis", "turn-tis", "seq-mis", "icepop", "geo-mask", "geo-mask-token-tis"]
)
def test_the_applied_weight_is_the_correction_of_the_trainer(preset: str) -> None:
    table = noisy(80, 0.4)
    built = trimtab.objective(preset)
    expected = []
    for row in table.split(1):  # one response each
        columns = (row.trainer, row.behavior, row.mask, row.turn_number)
        trainer, behavior, mask, turn = (torch.from_numpy(values)[None] for values in columns)
        correction = correct(trainer, behavior, mask, weight=built.weight, masks=built.masks, turn=turn)
        expected.append((correction.weight * correction.keep)[mask])
    applied = weights(built, AdviceData.of(table), 1.0)
    torch.testing.assert_close(applied, torch.cat(expected).double(), rtol=2e-5, atol=1e-7)


def test_equal_policies_leave_everything_as_it_is() -> None:
    for row in rate_presets(AdviceData.of(noisy(60, 0.0))):
        assert (row.kept, row.changed) == (1.0, 0.0), row.preset
        assert (row.ess, row.bias) == (pytest.approx(1.0), pytest.approx(0.0, abs=1e-6)), row.preset


def test_short_data_is_not_calibrated() -> None:
    clean = table([[1.0, 1.2], [2.0, 2.0]], [1.0, 1.0])
    assert not any(row.calibrated for row in rate_presets(AdviceData.of(clean), ("geo-mask", "token-tis")))
    clean.mask[:] = False
    assert rate_presets(AdviceData.of(clean)) == ()
