"""Where the causes `misaligned` (log-probs of other responses) and `stale` begin: small cases and doubtful ones."""

from __future__ import annotations

import re

import numpy as np
from tests.support.token_tables import table

from trimtab.diagnosis.causes.detector import Context, LogprobPairs
from trimtab.diagnosis.causes.old_weights import find_drift
from trimtab.diagnosis.causes.wrong_pairs import find_swapped_responses

CONTEXT = Context(floor=0.0, settings=None)


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
    assert match is not None
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
    for scale, columns, causes in ((0.6, versions, []), (0.02, versions, ["stale"]), (0.6, {}, ["stale"])):
        ratios = scale * (noise + 0.5 * advantage[:, None])
        pairs = LogprobPairs.of(table(ratios, behavior=behavior, advantage=advantage, **columns))
        assert [cause.name for cause in find_drift(pairs, CONTEXT)] == causes


def test_advantages_without_correlation_are_no_drift() -> None:
    rng = np.random.default_rng(3)
    ratios = 0.02 * rng.standard_normal((400, 12))
    columns = {"behavior": -rng.exponential(1.0, (400, 12)) - 0.1, "advantage": rng.standard_normal(400)}
    pairs = LogprobPairs.of(table(ratios, **columns))
    assert not find_drift(pairs, CONTEXT)
