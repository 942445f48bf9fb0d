"""Log-probs of other responses, and shifted from a turn on; old weights where they are in doubt."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from tests.support.planted_causes import causes
from tests.support.token_tables import table

from trimtab.diagnosis.causes.detector import Context, LogprobPairs
from trimtab.diagnosis.causes.old_weights import find_drift
from trimtab.diagnosis.causes.wrong_pairs import _is_concentrated, find_swapped_responses
from trimtab.diagnosis.records import Cause
from trimtab.diagnosis.tokens import TokenTable

RESPONSES, TURNS, OWN, SEEN = 40, 3, 16, 6


def conversations(seed: int, noise: float = 0.03) -> TokenTable:
    """Responses of three turns with observations between them; half of the tokens are next to certain."""
    rng = np.random.default_rng(seed)
    masks = [_mask(rng) for _ in range(RESPONSES)]
    mask = np.concatenate(masks)
    certain = -np.power(10.0, rng.uniform(-6, -2, len(mask)))
    behavior = np.where(rng.random(len(mask)) < 0.5, certain, -rng.exponential(1.2, len(mask)))
    trainer = np.minimum(behavior * (1 + noise * rng.standard_normal(len(mask))), 0.0)
    starts = np.cumsum([0, *map(len, masks)])
    return TokenTable(
        starts=starts, mask=mask, behavior=behavior.astype(np.float32), proximal=trainer.astype(np.float32)
    )


def _mask(rng: np.random.Generator) -> np.ndarray:
    parts = [np.ones(rng.integers(OWN - 6, OWN + 7), dtype=bool)]
    for _ in range(TURNS - 1):
        parts += [np.zeros(rng.integers(2, SEEN + 1), dtype=bool), np.ones(rng.integers(OWN - 6, OWN + 7), dtype=bool)]
    return np.concatenate(parts)


def moved(
    whole: TokenTable, by: int | Sequence[int], *, turn: int = 2, after: int = 0, every: int = 1, trained: bool = False
) -> TokenTable:
    """The trainer's log-probs rolled from `after` tokens into a turn on, in every so many responses, by one offset or
    by several in turns. trained: the lists hold trained tokens alone, so that observations do not move.
    """
    values, offsets = whole.proximal.copy(), [by] if isinstance(by, int) else by
    for row in range(0, whole.responses, every):
        start, stop = whole.starts[row], whole.starts[row + 1]
        mask = whole.mask[start:stop]
        begins = np.flatnonzero(mask & ~np.concatenate([[False], mask[:-1]]))
        places = np.arange(start + begins[turn - 1] + after, stop)
        if trained:
            places = places[whole.mask[places]]
        values[places] = np.roll(values[places], offsets[row % len(offsets)])
    return TokenTable(starts=whole.starts, mask=whole.mask, behavior=whole.behavior, proximal=values)


def only(table: TokenTable) -> Cause:
    """The one cause besides the noise."""
    result = [cause for cause in causes(table) if cause.name not in ("precision", "quantized")]
    assert len(result) == 1, [cause.name for cause in result]
    return result[0]


@pytest.mark.parametrize(("turn", "name"), [(1, "misaligned"), (2, "retokenized"), (3, "retokenized")])
@pytest.mark.parametrize(("trained", "every"), [(False, 1), (True, 2)])
@pytest.mark.parametrize("by", [1, 2, -1, -2])
def test_a_shift_is_retokenized_where_it_begins_with_a_later_turn(
    by: int, every: int, trained: bool, turn: int, name: str
) -> None:
    cause = only(moved(conversations(0), by, turn=turn, every=every, trained=trained))
    assert cause.name == name
    begins = f"the shift begins where turn {turn} begins (position {2 * turn - 2}"
    assert (begins in cause.evidence) == (turn > 1)
    assert cause.confidence > 0.9


@pytest.mark.parametrize(("turn", "name"), [(1, "misaligned"), (2, "retokenized")])
@pytest.mark.parametrize("seed", range(2))
def test_every_conversation_may_be_shifted_differently(seed: int, turn: int, name: str) -> None:
    assert only(moved(conversations(seed), [1, -1, 2], turn=turn)).name == name


@pytest.mark.parametrize(("turn", "name"), [(1, "misaligned"), (2, "retokenized")])
def test_log_probs_of_observations_may_be_zero(turn: int, name: str) -> None:
    whole = conversations(0)
    sides = {"behavior": whole.behavior, "proximal": whole.proximal}
    whole = replace(whole, **{side: np.where(whole.mask, logp, np.float32(0)) for side, logp in sides.items()})
    assert only(moved(whole, 2, turn=turn)).name == name


@pytest.mark.parametrize("turn", [1, 2])
def test_a_shift_from_the_middle_of_a_turn_is_misaligned(turn: int) -> None:
    assert only(moved(conversations(0), 2, turn=turn, after=7)).name == "misaligned"


def test_conversations_that_fit_have_no_such_cause() -> None:
    for seed in range(4):
        assert not {"misaligned", "retokenized"} & {cause.name for cause in causes(conversations(seed))}


def test_a_column_of_turns_names_the_turn_where_the_mask_has_other_gaps() -> None:
    shifted = moved(conversations(0), 2)
    mask = shifted.mask
    begins = mask & ~np.concatenate([[False], mask[:-1]])
    first = np.repeat(np.cumsum(begins)[shifted.starts[:-1]], shifted.lengths)
    holes = mask & (shifted.position == 4)  # an untrained token in every first turn
    by_column = replace(shifted, mask=mask & ~holes, turn=np.cumsum(begins) - first)
    assert "the shift begins where turn 2 begins (position 2" in only(by_column).evidence
    assert "the shift begins where turn 3 begins" in only(replace(by_column, turn=None)).evidence


CONTEXT = Context(floor=0.0, numerics=None)


def swapped(values: np.ndarray, order: np.ndarray) -> tuple[LogprobPairs, LogprobPairs | None]:
    """Responses with these log-probs (rows, length), the trainer's in another order, and the repaired ones if any."""
    pairs = LogprobPairs.of(table(values[order] - values, behavior=values))
    found = find_swapped_responses(pairs, CONTEXT)
    return pairs, found[0].remaining if found else None


def test_responses_of_four_tokens_are_matched_and_shorter_ones_are_not() -> None:
    rng = np.random.default_rng(0)
    for length, expected in ((4, True), (3, False)):
        values = -rng.exponential(3.0, (12, length)) - 0.5
        pairs, repaired = swapped(values, np.roll(np.arange(12), 1))
        assert (repaired is not None) == expected
        if repaired is not None:
            np.testing.assert_allclose(repaired.trainer, pairs.behavior, atol=1e-5)


def test_a_list_that_fits_no_better_than_the_next_one_is_no_match() -> None:
    """Two responses with the same log-probs: which of the two a list belongs to is not known."""
    rng = np.random.default_rng(1)
    values = np.repeat(-rng.exponential(3.0, (6, 8)) - 0.5, 2, axis=0)
    assert swapped(values, np.roll(np.arange(12), 2))[1] is None


def test_a_correlation_with_the_advantage_has_the_z_of_its_spread() -> None:
    rng = np.random.default_rng(2)
    advantage = rng.standard_normal(400)
    ratios = 0.02 * rng.standard_normal((400, 12)) + 0.01 * advantage[:, None]
    pairs = LogprobPairs.of(table(ratios, behavior=-rng.exponential(1.0, (400, 12)) - 0.1, advantage=advantage))
    [cause] = find_drift(pairs, CONTEXT)
    assert cause.name == "stale"
    match = re.search(r"correlation ([\d.]+), z = ([\d.]+)", cause.evidence)
    total = ratios.sum(1)
    expected = float(np.corrcoef(total, advantage)[0, 1])
    assert abs(float(match[1]) - expected) < 0.05
    # z = r sqrt(n) / std of the products, which is near 1 + r^2 for a bivariate normal.
    assert 0.5 < float(match[2]) / (expected * np.sqrt(400 / (1 + expected**2))) < 1.5


def test_coarse_noise_of_age_0_explains_a_correlation_with_the_advantage() -> None:
    """A sampler of four bits earns less where it errs; fine noise does not, and is drift whatever versions say."""
    rng = np.random.default_rng(2)
    advantage = rng.standard_normal(400)
    behavior = -rng.exponential(1.0, (400, 12)) - 0.1
    noise = rng.standard_normal((400, 12))
    versions = {"version": np.zeros((400, 12), np.int64), "proximal_version": np.zeros(400, np.int64)}
    for scale, columns, named in ((0.6, versions, []), (0.02, versions, ["stale"]), (0.6, {}, ["stale"])):
        ratios = scale * (noise + 0.5 * advantage[:, None])
        pairs = LogprobPairs.of(table(ratios, behavior=behavior, advantage=advantage, **columns))
        assert [cause.name for cause in find_drift(pairs, CONTEXT)] == named


def test_advantages_without_correlation_are_no_drift() -> None:
    rng = np.random.default_rng(3)
    ratios = 0.02 * rng.standard_normal((400, 12))
    columns = {"behavior": -rng.exponential(1.0, (400, 12)) - 0.1, "advantage": rng.standard_normal(400)}
    pairs = LogprobPairs.of(table(ratios, **columns))
    assert not find_drift(pairs, CONTEXT)


def test_jumps_are_at_boundaries_if_their_binomial_tail_is_small() -> None:
    """The bound is exp(hits - 10 e) (10 e / hits)^hits < 1e-6 with the rate e = (jumps elsewhere + 1) / 91."""
    token = np.arange(100)
    for hits, elsewhere, found in ((4, 0, False), (5, 0, True), (5, 1, False), (6, 1, True)):
        assert _is_concentrated((token < hits) | (token >= 100 - elsewhere), token < 10) == found
