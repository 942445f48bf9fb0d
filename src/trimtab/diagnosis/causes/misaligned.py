"""Detects `misaligned` and `retokenized` from shifts between the two lists of log-probs.

For every offset s the score of a token is min(|b_t - p_t|, 3) - min(|b_t - p_(t+s)|, 3): how much closer the
trainer's log-prob at the neighbor is than that at the token itself. On aligned data it is negative on average and the
maximal sum over a stretch of a response is near 0; on a shifted stretch the sum is the whole difference. A shift is
reported when

  * its stretches gain at least `MIN_GAIN` nats, `MIN_PART` of the total distance, and `MIN_LEAD` times the gain of the
    other offsets, and
  * inside them the shifted log-probs agree far better (`MAX_LEFT` of the distance, correlation `MIN_CORRELATION`).

Where responses have different shifts, each is decided separately: an offset must gain `MIN_LEAD` times as much as the
others and at least `MIN_RESPONSE_GAIN` nats, these responses together must gain as much as above, and the fit must be
closer (`MAX_RESPONSE_LEFT`). Where responses are too short or too certain for either, the score over all tokens
decides: it exceeds 0 by `WHOLE_Z` standard errors only for lists that are shifted as a whole.

The stretches are repaired, so that other causes stay detectable, and the remaining responses are searched again, since
they may have another shift. A shift that begins at a later turn is `retokenized`, any other `misaligned`. Log-probs
that no offset restores may be those of another response of equal length (`swapped.py`).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from trimtab.diagnosis.causes.detector import CauseMatch, Context
from trimtab.diagnosis.causes.evidence import confidence, correlation, z_of
from trimtab.diagnosis.causes.logprob_pairs import LogprobPairs
from trimtab.diagnosis.causes.retokenized import ShiftStart, find_shift_starts, shift_starts_text

MIN_GAIN = 12.0  # nats that all stretches of an offset must gain
MIN_PART = 0.22  # least part of all distance that an offset must gain
MIN_LEAD = 3.0  # least ratio of the gain to that of the other offsets
MAX_LEFT = 0.65  # part of the distance that an offset may leave
MIN_CORRELATION = 0.75  # least correlation of the shifted lists
MIN_STRETCH_GAIN = 3.0  # nats that a stretch must gain
MIN_RESPONSE_GAIN = 6.0  # nats that the offset of a single response must gain
MAX_RESPONSE_LEFT = 0.25  # part of its distance that the offset of a single response may leave
MAX_OTHER = 0.15  # share of the gain that other offsets may have before responses are decided one by one
WHOLE_Z = 6.0  # standard errors of the mean gain where no stretch is long enough
MIN_SURPRISE = 2.0  # nats of surprise that a response needs to show its shift

OFFSETS = tuple(s for k in range(1, 9) for s in (k, -k))
CAP = 3.0
"""Nats: a difference beyond it counts as this much."""
MAX_ROUNDS = 8
"""Most offsets of one data set."""


def find_shifts(tokens: LogprobPairs, _context: Context) -> list[CauseMatch]:
    """Finds shifts, and repairs the shifted stretches."""
    shifts: list[_Shift] = []
    remaining, parts = tokens, []
    while len(shifts) < MAX_ROUNDS and (shift := _best_shift(remaining)) is not None:
        shifts.append(shift)
        parts.append(remaining.repaired(remaining.trainer[shift.partner], shift.inside))
        # Tokens around a stretch have lost their partners, so that its whole response is removed from the search.
        remaining = remaining.select(~np.isin(remaining.row, remaining.row[shift.inside]))
    if not shifts:
        return []
    repaired = LogprobPairs.concat(parts)
    rows = sum(shift.rows for shift in shifts)
    # Responses too short or too certain to show their shift would look like noise, so that the remaining tokens are
    # kept only if they fit about as well as the repaired ones.
    can_show_shift = np.bincount(tokens.row, -tokens.behavior) > MIN_SURPRISE
    mostly = rows > 0.5 * can_show_shift.sum()
    clean = len(remaining) and not mostly and _distance(remaining).mean() <= 2 * _distance(repaired).mean()
    rest = LogprobPairs.concat([repaired, remaining]) if clean else repaired
    shifts.sort(key=lambda shift: -shift.gain)
    others = ", ".join(f"{shift.offset:+d}" for shift in shifts[1:])
    evidence = (
        f"the trainer's log-probs agree with the sampler's when moved by {shifts[0].offset:+d}"
        f"{f' (elsewhere by {others})' if others else ''}: {len(repaired)} of {len(tokens)} tokens, in {rows} of "
        f"{len(np.unique(tokens.row))} responses, fit the value of that neighbor, by {shifts[0].gain:.0f} nats in all"
    )
    starts = [start for shift in shifts for start in shift.starts]
    name = "misaligned"
    if len(starts) > rows / 2:
        name, evidence = "retokenized", f"{evidence}; {shift_starts_text(starts, rows)}"
    return [CauseMatch(name, evidence, rest, len(repaired), confidence(shifts[0].gain, MIN_GAIN))]


def _distance(tokens: LogprobPairs) -> np.ndarray:
    return np.minimum(np.abs(tokens.log_ratio), CAP)


@dataclass(frozen=True, eq=False)
class _Shift:
    """An offset, its gain in nats, the number of responses `rows`, the repaired tokens and where the shift begins."""

    offset: int
    gain: float
    rows: int
    inside: np.ndarray
    partner: np.ndarray
    starts: list[ShiftStart]


class _Candidate(NamedTuple):
    """An offset that may explain the data.

    gain: in nats. is_significant: whether that is enough. eligible: tokens (tokens,) that may be repaired, in stretches
    that gain; None for all tokens. max_left: part of its distance that the offset may leave.
    """

    offset: int
    gain: float
    is_significant: bool
    eligible: np.ndarray | None
    max_left: float


def _best_shift(tokens: LogprobPairs) -> _Shift | None:
    """Returns the offset with the largest gain and the stretches that it repairs; None without a significant one."""
    distance = _distance(tokens)
    if distance.sum() < MIN_GAIN:
        return None
    scores = [_score(tokens, distance, offset) for offset in OFFSETS]
    gains = np.stack([_stretches(score, tokens.row, MIN_STRETCH_GAIN)[0] for score, _ in scores])
    needed = max(MIN_GAIN, MIN_PART * distance.sum())

    # Stretches anywhere. Gains are compared for each pair, since far offsets have fewer pairs.
    rates = gains.sum(1) / [max(int(real.sum()), 1) for _, real in scores]
    best = int(gains.sum(1).argmax())
    is_ahead = rates[best] >= MIN_LEAD * np.median(np.delete(rates, best))
    gain, everywhere = float(gains[best].sum()), np.ones(len(tokens), dtype=bool)
    by_stretches = _Candidate(OFFSETS[best], gain, is_ahead and gain >= needed, everywhere, MAX_LEFT)

    # Responses in which one offset is far ahead of the others; these must gain as much together.
    largest = gains.max(0)
    ahead = (largest >= MIN_RESPONSE_GAIN) & (largest >= MIN_LEAD * np.median(gains, 0))
    won = np.where(ahead & (gains.argmax(0) == np.arange(len(OFFSETS))[:, None]), gains, 0.0)
    best = int(won.sum(1).argmax())
    gain, is_enough = float(won[best].sum()), won.sum() >= needed
    eligible = won[best][tokens.row] > 0
    by_responses = _Candidate(OFFSETS[best], gain, is_enough and gain >= MIN_GAIN, eligible, MAX_RESPONSE_LEFT)
    has_others = gain < (1 - MAX_OTHER) * won.sum()

    # All tokens, which does not say where the stretches are.
    wholes = [float(score[real].sum()) if z_of(score[real]) > WHOLE_Z else 0.0 for score, real in scores]
    best = int(np.argmax(wholes))
    by_all_tokens = _Candidate(OFFSETS[best], wholes[best], wholes[best] >= needed, None, MAX_LEFT)

    # Where responses have different offsets, one of them would also take stretches of the others.
    first, second = (by_responses, by_stretches) if has_others else (by_stretches, by_responses)
    for candidate in (first, second, by_all_tokens):
        if candidate.is_significant and (shift := _fitting(tokens, distance, candidate)) is not None:
            return shift
    return None


def _fitting(tokens: LogprobPairs, distance: np.ndarray, candidate: _Candidate) -> _Shift | None:
    """Returns the shift by an offset if its tokens agree far better so."""
    offset, eligible = candidate.offset, candidate.eligible
    score, real = _score(tokens, distance, offset)
    score = score if eligible is None else np.where(eligible, score, -CAP)
    chosen = real if eligible is None else _stretches(score, tokens.row, MIN_STRETCH_GAIN)[1] & real
    partner, _ = _partner(tokens, offset)
    behavior, moved = tokens.behavior[chosen], tokens.trainer[partner][chosen]
    near = np.minimum(np.abs(behavior - moved), CAP).mean() if chosen.sum() >= 6 else CAP
    if near > candidate.max_left * distance[chosen].mean() or correlation(behavior, moved) < MIN_CORRELATION:
        return None
    # Once the offset is known, stretches too short to establish it are repaired as well.
    inside = _trim(_stretches(score, tokens.row, MIN_STRETCH_GAIN / 10)[1] & real, tokens.row, offset)
    # Across masked tokens the neighbor among trained tokens is not the one at that offset: such pairs stay unrepaired.
    inside &= tokens.position[partner] - tokens.position == offset
    if inside.sum() < 6:
        return None
    rows = np.unique(tokens.row[inside])
    starts = find_shift_starts(tokens, np.where(real, score, 0.0), rows)
    return _Shift(offset, candidate.gain, len(rows), inside, partner, starts)


def _trim(inside: np.ndarray, row: np.ndarray, offset: int) -> np.ndarray:
    """Returns the stretches without the `|offset|` tokens whose partner lies beyond the end of the stretch."""
    kept = inside.copy()
    for k in range(1, abs(offset) + 1):
        if offset < 0:
            kept[k:] &= inside[:-k] & (row[k:] == row[:-k])
            kept[:k] = False
        else:
            # At the end of a response nothing follows the stretch.
            kept[:-k] &= inside[k:] | (row[k:] != row[:-k])
    return kept


def _score(tokens: LogprobPairs, distance: np.ndarray, offset: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns how much closer the partner is than the token's own value, and where there is a partner."""
    partner, real = _partner(tokens, offset)
    other = np.minimum(np.abs(tokens.behavior - tokens.trainer[partner]), CAP)
    return np.where(real, distance - other, -CAP), real


def _partner(tokens: LogprobPairs, offset: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the index of the token `offset` positions later in the same response, and whether there is one."""
    index = np.arange(len(tokens)) + offset
    partner = np.clip(index, 0, len(tokens) - 1)
    real = (index == partner) & (tokens.row[partner] == tokens.row)
    return partner, real


def _stretches(score: np.ndarray, row: np.ndarray, least: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns the gain of each response's best stretch (0 if below `least`), and the tokens in these stretches."""
    inside = np.zeros(len(score), dtype=bool)
    # A stretch cannot gain more than the sum of the positive scores: most responses are skipped.
    possible = np.bincount(row, np.maximum(score, 0.0)) >= least
    gains = np.zeros(len(possible))
    edges = np.flatnonzero(np.diff(row, prepend=-1, append=-1))
    for start, stop in itertools.pairwise(edges):
        if not possible[row[start]]:
            continue
        running = np.concatenate([[0.0], np.cumsum(score[start:stop])])
        lowest = np.minimum.accumulate(running)
        end = int(np.argmax(running - lowest))
        gain = running[end] - lowest[end]
        if gain >= least:
            begin = int(np.argmin(running[: end + 1]))
            inside[start + begin : start + end] = True
            gains[row[start]] = gain
    return gains, inside
