"""Detects `misaligned` and `retokenized` from shifts between the two lists of log-probs.

For every offset s the score of a token is min(|b_t - p_t|, 3) - min(|b_t - p_(t+s)|, 3): how much closer the
trainer's log-prob at the neighbor is than that at the token itself. On aligned data it is negative on average and the
maximal sum over a stretch of a response is near 0; on a shifted stretch the sum is the whole difference. A shift is
reported when

  * its stretches gain at least `shift-gain` nats, `shift-part` of the total distance, and `shift-lead` times the gain
    of the other offsets, and
  * inside them the shifted log-probs agree far better (`shift-fit` of the distance, correlation `shift-correlation`).

Where responses have different shifts, each is decided separately: an offset must gain `shift-lead` times as much as
the others and at least `shift-gain-single` nats, these responses together must gain as much as above, and the fit must
be closer (`shift-fit-single`). Where responses are too short or too certain for either, the score over all tokens
decides: it exceeds 0 by `shift-whole-z` standard errors only for lists that are shifted as a whole.

The stretches are repaired, so that other causes stay detectable, and the remaining responses are searched again, since
they may have another shift. A shift that begins at a later turn is `retokenized` (`turns.py`), any other `misaligned`.
Log-probs that no offset restores may be those of another response of equal length (`swapped.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from trimtab.diagnosis.causes.evidence import LogprobPairs, confidence, z_of
from trimtab.diagnosis.causes.turns import ShiftStart, find_shift_starts, shift_starts_text
from trimtab.diagnosis.causes.what_is_left import Context, Finding
from trimtab.diagnosis.thresholds import THRESHOLDS as LIMITS

# For the offset of a single response, which is chosen among many.
OFFSETS = tuple(s for k in range(1, 9) for s in (k, -k))
CAP = 3.0
MAX_ROUNDS = 8
FIX_TURNS = (
    "Train on the token ids the sampler returned: the conversation was encoded again where that turn begins, and got "
    "another length. Append new tokens to the old ids, and take the loss mask from them."
)
FIX = (
    "Pair each sampled token with its own log-prob: logits at position t predict token t + 1, and both lists start at "
    "the first response token."
)


def find_shifts(tokens: LogprobPairs, _context: Context) -> list[Finding]:
    """Finds shifts, and repairs the shifted stretches."""
    shifts: list[_Shift] = []
    remaining, repaired_parts = tokens, []
    for _ in range(MAX_ROUNDS):
        shift = _best_shift(remaining)
        if shift is None:
            break
        shifts.append(shift)
        inside = shift.inside
        repaired_parts.append(remaining.repaired(remaining.trainer[shift.partner], inside))
        # Tokens around a stretch have lost their partners, so that its whole response is removed from the search.
        remaining = remaining.select(~np.isin(remaining.row, remaining.row[inside]))
    if not shifts:
        return []
    largest = max(shifts, key=lambda shift: shift.gain)
    others = ", ".join(f"{shift.offset:+d}" for shift in shifts if shift is not largest)
    moved, rows = sum(len(part) for part in repaired_parts), sum(shift.rows for shift in shifts)
    evidence = (
        f"the trainer's log-probs agree with the sampler's when moved by {largest.offset:+d}"
        f"{f' (elsewhere by {others})' if others else ''}: {moved} of {len(tokens)} tokens, in {rows} of "
        f"{len(np.unique(tokens.row))} responses, fit their neighbor's value, {largest.gain:.0f} nats closer"
    )
    repaired = LogprobPairs.concat(repaired_parts)
    # Responses too short or too certain to show their shift would look like noise, so that the remaining tokens are
    # kept only if they fit about as well as the repaired ones.
    can_show_shift = np.bincount(tokens.row, -tokens.behavior) > LIMITS["shift-surprise"]
    mostly = rows > 0.5 * can_show_shift.sum()
    clean = len(remaining) and not mostly and _distance(remaining) <= 2 * _distance(repaired)
    starts = [start for shift in shifts for start in shift.starts]
    starts_at_turns = len(starts) > rows / 2
    if starts_at_turns:
        evidence += f"; {shift_starts_text(starts, rows)}"
    name, fix = ("retokenized", FIX_TURNS) if starts_at_turns else ("misaligned", FIX)
    rest = LogprobPairs.concat([repaired, remaining]) if clean else repaired
    return [Finding(name, evidence, fix, rest, moved, confidence(largest.gain, LIMITS["shift-gain"]))]


def _distance(tokens: LogprobPairs) -> float:
    return float(np.minimum(np.abs(tokens.log_ratio), CAP).mean()) if len(tokens) else 0.0


@dataclass(frozen=True, eq=False)
class _Shift:
    """An offset, its gain in nats, the number of responses `rows`, the repaired tokens and where the shift begins."""

    offset: int
    gain: float
    rows: int
    inside: np.ndarray
    partner: np.ndarray
    starts: list[ShiftStart]


def _best_shift(tokens: LogprobPairs) -> _Shift | None:
    """Returns the offset with the largest gain and the stretches that it repairs; None without a significant one."""
    distance = np.minimum(np.abs(tokens.log_ratio), CAP)
    if distance.sum() < LIMITS["shift-gain"]:
        return None
    gains: dict[int, np.ndarray] = {}
    rates: dict[int, float] = {}
    wholes: dict[int, float] = {}
    for offset in OFFSETS:
        score, real = _score(tokens, distance, offset)
        gains[offset], _ = _stretches(score, tokens.row, LIMITS["shift-stretch-gain"])
        # Per pair, since far offsets have fewer pairs.
        rates[offset] = float(gains[offset].sum()) / max(int(real.sum()), 1)
        wholes[offset] = float(score[real].sum()) if z_of(score[real]) > LIMITS["shift-whole-z"] else 0.0
    needed = max(LIMITS["shift-gain"], LIMITS["shift-part"] * distance.sum())
    everywhere = np.ones(len(distance), dtype=bool)
    best, gain = _by_stretches(gains, rates)
    single, single_gain, rows, differ = _by_responses(gains, needed)
    whole = max(wholes, key=lambda s: wholes[s])
    candidates = [
        (best, gain, needed, everywhere, LIMITS["shift-fit"]),
        (single, single_gain, LIMITS["shift-gain"], rows[tokens.row], LIMITS["shift-fit-single"]),
        (whole, wholes[whole], needed, None, LIMITS["shift-fit"]),
    ]
    if differ:  # one offset would also take stretches of responses with another one
        candidates[:2] = candidates[1::-1]
    for offset, gained, least, eligible, fit in candidates:
        if gained >= least and (shift := _fitting(tokens, distance, offset, gained, eligible, fit)) is not None:
            return shift
    return None


def _fitting(
    tokens: LogprobPairs, distance: np.ndarray, offset: int, gain: float, eligible: np.ndarray | None, fit: float
) -> _Shift | None:
    """Returns the shift by an offset if its tokens agree far better so; `eligible`: tokens that may, None for all."""
    score, real = _score(tokens, distance, offset)
    score = score if eligible is None else np.where(eligible, score, -CAP)
    chosen = real if eligible is None else _stretches(score, tokens.row, LIMITS["shift-stretch-gain"])[1] & real
    partner, _ = _partner(tokens, offset)
    behavior, moved = tokens.behavior[chosen], tokens.trainer[partner][chosen]
    near = np.minimum(np.abs(behavior - moved), CAP).mean() if chosen.sum() >= 6 else CAP
    if near > fit * distance[chosen].mean() or _correlation(behavior, moved) < LIMITS["shift-correlation"]:
        return None
    # Once the offset is known, stretches too short to establish it are repaired as well.
    inside = _trim(_stretches(score, tokens.row, LIMITS["shift-stretch-gain"] / 10)[1] & real, tokens.row, offset)
    # Across masked tokens the neighbor among trained tokens is not the one at that offset: such pairs stay unrepaired.
    inside &= tokens.position[partner] - tokens.position == offset
    if inside.sum() < 6:
        return None
    rows = np.unique(tokens.row[inside])
    starts = find_shift_starts(tokens, np.where(real, score, 0.0), rows)
    return _Shift(offset, gain, len(rows), inside, partner, starts)


def _by_stretches(gains: Mapping[int, np.ndarray], rates: Mapping[int, float]) -> tuple[int, float]:
    """Returns the offset with the largest gain, and that gain; 0 unless `shift-lead` times that of the others."""
    totals = {offset: float(gain.sum()) for offset, gain in gains.items()}
    best = max(totals, key=lambda s: totals[s])
    usual = float(np.median([rate for s, rate in rates.items() if s != best]))
    return best, totals[best] if rates[best] >= LIMITS["shift-lead"] * usual else 0.0


def _by_responses(gains: Mapping[int, np.ndarray], needed: float) -> tuple[int, float, np.ndarray, bool]:
    """Returns the offset with the most gain in responses where one is `shift-lead` times ahead, and these (rows,).

    Its gain is 0 unless the responses in which some offset is ahead gain `needed` together. The last value says whether
    others gain more than `shift-other` of the total.
    """
    table = np.stack(list(gains.values()))
    first = table.argmax(0)
    ahead = (table.max(0) >= LIMITS["shift-gain-single"]) & (table.max(0) >= LIMITS["shift-lead"] * np.median(table, 0))
    won = np.array([table[index, ahead & (first == index)].sum() for index in range(len(table))])
    best = int(won.argmax())
    gain = float(won[best]) if won.sum() >= needed else 0.0
    return list(gains)[best], gain, ahead & (first == best), bool(won[best] < (1 - LIMITS["shift-other"]) * won.sum())


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


def _correlation(x: np.ndarray, y: np.ndarray) -> float:
    if len(x) < 3 or x.std() == 0 or y.std() == 0:
        return 0.0
    return float(np.corrcoef(x, y)[0, 1])
