"""Checks of the sampled ids scored again: by the sampler's prefill, and by the teacher of a distillation.

Prefill tells which part of the sampler makes the mismatch. A teacher is another model, so that its log-probs may differ
from the sampler's by any amount; but both are surprised by the same tokens. The correlation of the two lists is
therefore highest in place, and near 0 where the teacher scored other ids or another context.
"""

from __future__ import annotations

import numpy as np

from trimtab.diagnosis.measure.trained_tokens import TrainedTokens
from trimtab.diagnosis.records import finding
from trimtab.diagnosis.tokens import TokenTable, k3
from trimtab.errors import Finding
from trimtab.numbers import short


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
