"""Which side is wrong, by log-probs of the same tokens that were computed a third time (`trimtab rescore`)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from trimtab.diagnosis.measure.trained_tokens import TrainedTokens
from trimtab.diagnosis.records import RescoredSides, finding, read_table
from trimtab.diagnosis.tokens import TokenTable, k3
from trimtab.errors import Finding
from trimtab.intervals import cluster_intervals
from trimtab.runs.metric_catalog import k3_ranges
from trimtab.text import short

RESAMPLED = 1024  # largest number of groups or responses that are resampled; more are merged evenly
LEAD = 4.0  # one side alone is wrong only if its k3 is this many times the other side's
ORDINARY, ORDINARY_BOTH = (k3_ranges()[name].high for name in ("dense", "small-dense"))
"""k3 that 16-bit arithmetic makes: on any side, and at most, if both differ alike."""


def judge_sides(table: TokenTable) -> RescoredSides | None:
    """Returns which side is wrong; None without the column `logp_rescored` or a trained token.

    One side alone is wrong if its k3 exceeds `ORDINARY` (16-bit arithmetic), and is `LEAD` times the other side's with
    disjoint intervals. Otherwise both are wrong if a k3 exceeds `ORDINARY_BOTH` (small models in 16 bits).
    """
    tokens = TrainedTokens.of(table, 0)
    if table.rescored is None or not len(tokens):
        return None
    rescored = tokens.at_tokens(table.rescored).astype(np.float64)
    known = np.isfinite(rescored)
    if not known.any():
        return None
    pairs = {
        "sampler": rescored - tokens.behavior,
        "trainer": tokens.trainer - rescored,
        "mismatch": tokens.trainer - tokens.behavior,
    }
    cluster = (tokens.cluster % np.uint64(RESAMPLED)).astype(np.int64)[tokens.rows][known]
    fields = (None, *(k3(pair[known]) for pair in pairs.values()))
    sums = np.stack([np.bincount(cluster, weights=field, minlength=RESAMPLED) for field in fields], axis=1)
    means = cluster_intervals(
        sums[sums[:, 0] > 0],
        lambda sums: {name: sums[..., at] / sums[..., 0] for at, name in enumerate(pairs, start=1)},
        seed=0,
    )
    near, far = sorted(("sampler", "trainer"), key=lambda name: means[name].value)
    side = "both"
    if means[far].value <= ORDINARY:
        side = "neither"
    elif means[far].value >= LEAD * means[near].value and not means[far].low <= means[near].high:
        side = far
    elif means[far].value <= ORDINARY_BOTH:
        side = "neither"
    is_other = side == "both" and means[near].value > means["mismatch"].value
    return RescoredSides(side, **means, is_other_model=is_other, tokens=int(known.sum()))


def describe_sides(sides: RescoredSides | None) -> Iterator[Finding]:
    """Yields the finding that says which side is wrong, if that is known."""
    if sides is not None:
        which = read_table("texts.toml")["rescored"]["other" if sides.is_other_model else sides.side]
        yield finding("rescored", sampler=short(sides.sampler.value), trainer=short(sides.trainer.value), which=which)
