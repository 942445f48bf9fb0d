"""Checks of the sampled ids scored again: by the sampler's prefill, a third implementation, and a teacher.

Prefill tells which part of the sampler makes the mismatch, a third implementation which side does. A teacher is another
model, so that its log-probs may differ from the sampler's by any amount; but both are surprised by the same tokens. The
correlation of the two lists is therefore highest in place, and near 0 where the teacher scored other ids or another
context.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimtab.diagnosis.measure.trained_tokens import TrainedTokens
from trimtab.diagnosis.records import finding, read_table
from trimtab.diagnosis.tokens import TokenTable, k3
from trimtab.errors import Finding
from trimtab.intervals import Interval, cluster_intervals
from trimtab.runs.metric_catalog import k3_ranges
from trimtab.text import short


class PrefillSums:
    """Sums of k3 of decode/prefill and of prefill/trainer over the trained tokens."""

    def __init__(self) -> None:
        self._sums, self._tokens = np.zeros(2), 0

    def add(self, tokens: TrainedTokens) -> None:
        if tokens.table.prefill is not None:
            prefill = tokens.at_tokens(tokens.table.prefill).astype(np.float64)
            self._sums += k3(np.stack([prefill - tokens.behavior, tokens.trainer - prefill])).sum(1)
            self._tokens += len(tokens)

    def findings(self) -> tuple[Finding, ...]:
        """Returns one finding, or none where the data has no prefill."""
        if not self._tokens:
            return ()
        decode, engine = (float(value) for value in self._sums / self._tokens)
        parts = {"decode (cache or decode kernels)": decode, "the engine (weights or numerics)": engine}
        # Two parts whose k3 differ by less than a factor of 2 are both of the size of the whole.
        carry = [name for name, size in parts.items() if 2 * size >= max(parts.values())]
        return (finding("prefill", decode=short(decode), engine=short(engine), parts=" and ".join(carry)),)


CLUSTERS = 1024  # groups or responses that are resampled; more are merged evenly
LEAD = 4.0  # times by which the k3 of one side must be larger for the mismatch to be its alone
ORDINARY, ORDINARY_BOTH = (k3_ranges()[name].high for name in ("dense", "small-dense"))
"""k3 that 16-bit arithmetic makes: on any side, and at most, if both differ alike."""


@dataclass(frozen=True)
class RescoredSides:
    """Which side is wrong according to the ids scored again from the same checkpoint (`trimtab rescore`).

    side: sampler, trainer, both or neither. sampler, trainer: k3 between each and the column scored again; mismatch:
    between the two; nats per token. is_other_model: whether both are nearer to one another than to that column, as
    where the checkpoint is not that of these responses. tokens: number of trained tokens.
    """

    side: str
    sampler: Interval
    trainer: Interval
    mismatch: Interval
    is_other_model: bool
    tokens: int


def rescored_sides(table: TokenTable) -> RescoredSides | None:
    """Returns which side is wrong; None without the column `logp_rescored` or a trained token.

    A side is wrong alone where its k3 is beyond that of 16-bit arithmetic and `LEAD` times that of the other, with
    disjoint intervals. Both are wrong where they are alike and beyond what small models reach in 16 bits.
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
    cluster = (tokens.cluster % np.uint64(CLUSTERS)).astype(np.int64)[tokens.rows][known]
    fields = (None, *(k3(pair[known]) for pair in pairs.values()))
    sums = np.stack([np.bincount(cluster, weights=field, minlength=CLUSTERS) for field in fields], axis=1)
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


def rescored_findings(table: TokenTable) -> tuple[Finding, ...]:
    """Returns one finding, or none without the column `logp_rescored`."""
    if (found := rescored_sides(table)) is None:
        return ()
    which = read_table("texts.toml")["rescored"]["other" if found.is_other_model else found.side]
    return (finding("rescored", sampler=short(found.sampler.value), trainer=short(found.trainer.value), which=which),)


FARTHEST = 4  # tokens that a shift is looked for
MIN_TOKENS = 200  # fewest trained tokens that are judged
MIN_Z = 6.0  # standard errors by which another offset must correlate better than none
MIN_LEAD = 0.1  # and the least difference of the two correlations
MIN_MOVED = 0.3  # least correlation at another offset: of one text, both are surprised alike
MIN_CORRELATION = 0.15  # below it the lists have nothing to do with each other
LOWEST = -10.0  # log-probs count as at least this


def teacher_findings(table: TokenTable) -> tuple[Finding, ...]:
    """Returns one finding, or none without the column `logp_teacher` or with fewer than `MIN_TOKENS` trained tokens."""
    if table.teacher is None:
        return ()
    places = np.flatnonzero(table.mask)
    if len(places) < MIN_TOKENS:
        return ()
    student, teacher = (
        np.maximum(values[places], LOWEST).astype(np.float64) for values in (table.behavior, table.teacher)
    )
    found = {offset: _correlation(table, places, student, teacher, offset) for offset in range(-FARTHEST, FARTHEST + 1)}
    best = max(found, key=lambda offset: found[offset])
    in_place = found[0]
    z = (np.arctanh(min(found[best], 0.999)) - np.arctanh(min(in_place, 0.999))) * np.sqrt(len(places) / 2)
    if best and z > MIN_Z and found[best] - in_place > MIN_LEAD and found[best] > MIN_MOVED:
        return (finding("teacher-moved", by=best, moved=found[best], in_place=in_place),)
    if in_place < MIN_CORRELATION:
        return (finding("teacher-unrelated", in_place=in_place),)
    kl = short(float((table.behavior[places].astype(np.float64) - table.teacher[places]).mean()))
    return (finding("teacher", kl=kl, in_place=in_place),)


def _correlation(table: TokenTable, places: np.ndarray, student: np.ndarray, teacher: np.ndarray, offset: int) -> float:
    """Returns the correlation of the student's values with the teacher's `offset` tokens later; 0 if undefined."""
    index = np.arange(max(0, -offset), len(places) - max(0, offset))
    other = index + offset
    # Within a response, and not across untrained tokens.
    index, other = (
        part[(places[other] - places[index] == offset) & (table.row[places[other]] == table.row[places[index]])]
        for part in (index, other)
    )
    x, y = student[index], teacher[other]
    if len(x) < MIN_TOKENS // 2 or x.std() == 0 or y.std() == 0:
        return 0.0
    return float(np.corrcoef(x, y)[0, 1])
