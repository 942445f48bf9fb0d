"""Detects `misaligned` and `retokenized` from shifts between the two lists of log-probs.

For every offset s the score of a token is min(|b_t - p_t|, 3) - min(|b_t - p_(t+s)|, 3): how much closer the
trainer's log-prob at the neighbor is than that at the token itself. On aligned data it is negative on average and the
maximal sum over a stretch of a response is near 0; on a shifted stretch the sum is the whole difference. A shift is
reported when

  * its stretches gain at least `LEAST` nats, `PART` of the total distance, and `CLEAR` times the gain of the other
    offsets, and
  * inside them the shifted log-probs agree far better (`FIT` of the distance, correlation `TIE`).

Where responses have different shifts, each is decided separately: an offset must gain `CLEAR` times as much as the
others and at least `ALONE` nats, these responses together must gain as much as above, and the fit must be closer
(`FIT_ALONE`). Where responses are too short or too certain for either, the score over all tokens decides: it exceeds 0
by `CERTAIN` standard errors only for lists that are shifted as a whole.

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
from trimtab.diagnosis.causes.turns import Begin, begins_of, begins_text
from trimtab.diagnosis.records import Cause

FIT_ALONE, ALONE = 0.25, 6.0  # of a response's own offset: it was chosen among many
OFFSETS = tuple(s for k in range(1, 9) for s in (k, -k))
CAP, STRETCH, LEAST, CLEAR, FIT, TIE, PART = 3.0, 3.0, 12.0, 3.0, 0.65, 0.75, 0.22
CERTAIN = 6.0
INFORMS = 2.0  # nats of surprise in a response that could show its shift
ROUNDS = 4
FIX_TURNS = (
    "Train on the token ids the sampler returned: the conversation was encoded again where that turn begins, and got "
    "another length. Append new tokens to the old ids, and take the loss mask from them."
)
FIX = (
    "Pair each sampled token with its own log-prob: logits at position t predict token t + 1, and both lists start at "
    "the first response token."
)


def find_shifts(tokens: LogprobPairs) -> tuple[Cause | None, LogprobPairs]:
    """Returns the cause, if detected, and the correctly paired tokens after repair of the shifted stretches."""
    shifts: list[_Shift] = []
    left, good = tokens, []
    for _ in range(ROUNDS):
        shift = _best(left)
        if shift is None:
            break
        shifts.append(shift)
        inside = shift.inside
        good.append(left.repaired(left.trainer[shift.partner], inside))
        # LogprobPairs around a stretch have lost their partners, so that its whole response is removed from the search.
        left = left.kept(~np.isin(left.row, left.row[inside]))
    if not shifts:
        return None, tokens
    most = max(shifts, key=lambda shift: shift.gain)
    others = ", ".join(f"{shift.offset:+d}" for shift in shifts if shift is not most)
    moved, rows = sum(len(part) for part in good), sum(shift.rows for shift in shifts)
    evidence = (
        f"the trainer's log-probs agree with the sampler's when moved by {most.offset:+d}"
        f"{f' (elsewhere by {others})' if others else ''}: {moved} of {len(tokens)} tokens, in {rows} of "
        f"{len(np.unique(tokens.row))} responses, fit their neighbor's value, {most.gain:.0f} nats closer"
    )
    repaired = LogprobPairs.concat(good)
    # Responses too short or too certain to show their shift would look like noise, so that the remaining tokens are
    # kept only if they fit about as well as the repaired ones.
    informs = np.bincount(tokens.row, -tokens.behavior) > INFORMS
    mostly = rows > 0.5 * informs.sum()
    clean = len(left) and not mostly and _distance(left) <= 2 * _distance(repaired)
    begins = [begin for shift in shifts for begin in shift.begins]
    starts_at_turns = len(begins) > rows / 2
    if starts_at_turns:
        evidence += f"; {begins_text(begins, rows)}"
    name, fix = ("retokenized", FIX_TURNS) if starts_at_turns else ("misaligned", FIX)
    cause = Cause(name, confidence(most.gain, LEAST), evidence, fix)
    return cause, LogprobPairs.concat([repaired, left]) if clean else repaired


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
    begins: list[Begin]


def _best(tokens: LogprobPairs) -> _Shift | None:
    """Returns the offset with the largest gain and the stretches that it repairs; None without a significant one."""
    own = np.minimum(np.abs(tokens.log_ratio), CAP)
    if own.sum() < LEAST:
        return None
    gains: dict[int, np.ndarray] = {}
    rates: dict[int, float] = {}
    wholes: dict[int, float] = {}
    for offset in OFFSETS:
        score, real = _score(tokens, own, offset)
        gains[offset], _ = _stretches(score, tokens.row, STRETCH)
        # Per pair, since far offsets have fewer pairs.
        rates[offset] = float(gains[offset].sum()) / max(int(real.sum()), 1)
        wholes[offset] = float(score[real].sum()) if z_of(score[real]) > CERTAIN else 0.0
    needed = max(LEAST, PART * own.sum())
    best, gain = _by_stretches(gains, rates)
    eligible, fit, together = np.ones(len(own), dtype=bool), FIT, False
    if gain < needed:
        best, gain, rows = _by_responses(gains, needed)
        eligible, fit = rows[tokens.row], FIT_ALONE
    if gain < LEAST:
        best = max(wholes, key=lambda s: wholes[s])
        gain = wholes[best]
        eligible, fit, together = np.ones(len(own), dtype=bool), FIT, True
        if gain < needed:
            return None
    score, real = _score(tokens, own, best)
    score = np.where(eligible, score, -CAP)
    chosen = real if together else _stretches(score, tokens.row, STRETCH)[1] & real
    partner, _ = _partner(tokens, best)
    behavior, moved = tokens.behavior[chosen], tokens.trainer[partner][chosen]
    near = np.minimum(np.abs(behavior - moved), CAP).mean() if chosen.sum() >= 6 else CAP
    if near > fit * own[chosen].mean() or _correlation(behavior, moved) < TIE:
        return None
    # Once the offset is known, stretches too short to establish it are repaired as well.
    inside = _trimmed(_stretches(score, tokens.row, STRETCH / 10)[1] & real, tokens.row, best)
    # Across masked tokens the neighbor among trained tokens is not the one at that offset: such pairs stay unrepaired.
    inside &= tokens.place[partner] - tokens.place == best
    if inside.sum() < 6:
        return None
    rows = np.unique(tokens.row[inside])
    return _Shift(best, gain, len(rows), inside, partner, begins_of(tokens, np.where(real, score, 0.0), rows))


def _by_stretches(gains: Mapping[int, np.ndarray], rates: Mapping[int, float]) -> tuple[int, float]:
    """Returns the offset with the largest gain, and that gain, or 0 unless it is `CLEAR` times that of the others."""
    totals = {offset: float(gain.sum()) for offset, gain in gains.items()}
    best = max(totals, key=lambda s: totals[s])
    usual = float(np.median([rate for s, rate in rates.items() if s != best]))
    return best, totals[best] if rates[best] >= CLEAR * usual else 0.0


def _by_responses(gains: Mapping[int, np.ndarray], needed: float) -> tuple[int, float, np.ndarray]:
    """Returns the offset that wins the most gain in responses where one is `CLEAR` times ahead, and these (rows,).

    Its gain is 0 unless the responses in which some offset is ahead gain `needed` together.
    """
    table = np.stack(list(gains.values()))
    first = table.argmax(0)
    ahead = (table.max(0) >= ALONE) & (table.max(0) >= CLEAR * np.median(table, 0))
    won = np.array([table[index, ahead & (first == index)].sum() for index in range(len(table))])
    best = int(won.argmax())
    gain = float(won[best]) if won.sum() >= needed else 0.0
    return list(gains)[best], gain, ahead & (first == best)


def _trimmed(inside: np.ndarray, row: np.ndarray, offset: int) -> np.ndarray:
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


def _score(tokens: LogprobPairs, own: np.ndarray, offset: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns how much closer the partner is than the token's own value, and where there is a partner."""
    partner, real = _partner(tokens, offset)
    other = np.minimum(np.abs(tokens.behavior - tokens.trainer[partner]), CAP)
    return np.where(real, own - other, -CAP), real


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


def _correlation(left: np.ndarray, right: np.ndarray) -> float:
    if len(left) < 3 or left.std() == 0 or right.std() == 0:
        return 0.0
    return float(np.corrcoef(left, right)[0, 1])
