"""Detects `misaligned` and `retokenized` from shifts between the two lists of log-probs.

For every offset s the score of a token is min(|b_t - p_t|, 3) - min(|b_t - p_(t+s)|, 3): how much closer the
trainer's neighbor is than its own. On aligned data it is negative on average, so the best stretch of a response
collects next to nothing; on a shifted stretch it collects the whole difference. A shift is named when

  * its stretches collect at least `LEAST` nats, `PART` of all the distance there is, and `CLEAR` times what the other
    offsets collect by accident, and
  * inside them the shifted log-probs agree far better (`FIT` of the distance, correlation `TIE`).

Where responses are shifted differently, each decides for itself: an offset must be `CLEAR` times ahead of the others
and collect `ALONE` nats, those responses must collect as much as above together, and the fit must be closer
(`FIT_ALONE`). Where responses are too short or too certain for either, the score of all tokens together decides: it is
above 0, by `CERTAIN` standard errors, only for lists that are shifted as a whole.

Found stretches are repaired, so that what else is wrong still shows, and the other responses are searched again: they
may be shifted differently. A shift that begins where a later turn does is `retokenized` (`turns.py`), any other
`misaligned`. What no offset restores may still be the log-probs of another response of equal length.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from trimtab.diagnosis.causes.evidence import Tokens, joined, sureness, z_of
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


def find_shifts(tokens: Tokens) -> tuple[Cause | None, Tokens]:
    """The cause, if found, and the tokens that are paired rightly once its stretches are repaired."""
    found: list[_Found] = []
    left, good = tokens, []
    for _ in range(ROUNDS):
        one = _best(left)
        if one is None:
            break
        found.append(one)
        inside = one.inside
        good.append(left.repaired(left.trainer[one.partner], inside))
        # What lies around a stretch in its response has lost its partners; the other responses are searched again.
        left = left.kept(~np.isin(left.row, left.row[inside]))
    if not found:
        return None, tokens
    most = max(found, key=lambda one: one.gain)
    others = ", ".join(f"{one.offset:+d}" for one in found if one is not most)
    moved, rows = sum(len(part) for part in good), sum(one.rows for one in found)
    evidence = (
        f"the trainer's log-probs agree with the sampler's when moved by {most.offset:+d}"
        f"{f' (elsewhere by {others})' if others else ''}: {moved} of {len(tokens)} tokens, in {rows} of "
        f"{len(np.unique(tokens.row))} responses, fit their neighbor's value, {most.gain:.0f} nats closer"
    )
    fine = joined(good)
    # Responses too short or too certain to show their shift would pass for noise: the rest must be as good as this.
    informs = np.bincount(tokens.row, -tokens.behavior) > INFORMS
    mostly = rows > 0.5 * informs.sum()
    clean = len(left) and not mostly and _distance(left) <= 2 * _distance(fine)
    begins = [begin for one in found for begin in one.begins]
    turned = len(begins) > rows / 2
    if turned:
        evidence += f"; {begins_text(begins, rows)}"
    name, fix = ("retokenized", FIX_TURNS) if turned else ("misaligned", FIX)
    cause = Cause(name, sureness(most.gain, LEAST), evidence, fix)
    return cause, joined([fine, left]) if clean else fine


def _distance(tokens: Tokens) -> float:
    return float(np.minimum(np.abs(tokens.log_ratio), CAP).mean()) if len(tokens) else 0.0


@dataclass(frozen=True, eq=False)
class _Found:
    offset: int
    gain: float
    rows: int
    inside: np.ndarray
    partner: np.ndarray
    begins: list[Begin]


def _best(tokens: Tokens) -> _Found | None:
    """The offset that explains most, and every stretch it repairs."""
    own = np.minimum(np.abs(tokens.log_ratio), CAP)
    if own.sum() < LEAST:
        return None
    gains: dict[int, np.ndarray] = {}
    rates: dict[int, float] = {}
    wholes: dict[int, float] = {}
    for offset in OFFSETS:
        score, real = _score(tokens, own, offset)
        gains[offset], _ = _stretches(score, tokens.row, STRETCH)
        # Far offsets have fewer pairs to be lucky with.
        rates[offset] = float(gains[offset].sum()) / max(int(real.sum()), 1)
        wholes[offset] = float(score[real].sum()) if z_of(score[real]) > CERTAIN else 0.0
    needed = max(LEAST, PART * own.sum())
    best, gain = _by_stretches(gains, rates)
    theirs, fit, together = np.ones(len(own), dtype=bool), FIT, False
    if gain < needed:
        best, gain, rows = _by_responses(gains, needed)
        theirs, fit = rows[tokens.row], FIT_ALONE
    if gain < LEAST:
        best = max(wholes, key=lambda s: wholes[s])
        gain = wholes[best]
        theirs, fit, together = np.ones(len(own), dtype=bool), FIT, True
        if gain < needed:
            return None
    score, real = _score(tokens, own, best)
    score = np.where(theirs, score, -CAP)
    chosen = real if together else _stretches(score, tokens.row, STRETCH)[1] & real
    partner, _ = _partner(tokens, best)
    behavior, moved = tokens.behavior[chosen], tokens.trainer[partner][chosen]
    near = np.minimum(np.abs(behavior - moved), CAP).mean() if chosen.sum() >= 6 else CAP
    if near > fit * own[chosen].mean() or _correlation(behavior, moved) < TIE:
        return None
    # Once the offset is known, a stretch too short to prove it still shows it.
    inside = _trimmed(_stretches(score, tokens.row, STRETCH / 10)[1] & real, tokens.row, best)
    # Across masked tokens a neighbor of the trained tokens is not the one so many places on: such pairs stay unknown.
    inside &= tokens.place[partner] - tokens.place == best
    if inside.sum() < 6:
        return None
    rows = np.unique(tokens.row[inside])
    return _Found(best, gain, len(rows), inside, partner, begins_of(tokens, np.where(real, score, 0.0), rows))


def _by_stretches(gains: Mapping[int, np.ndarray], rates: Mapping[int, float]) -> tuple[int, float]:
    """The offset that collects most, with 0 unless it is `CLEAR` times ahead of the others."""
    totals = {offset: float(gain.sum()) for offset, gain in gains.items()}
    best = max(totals, key=lambda s: totals[s])
    usual = float(np.median([rate for s, rate in rates.items() if s != best]))
    return best, totals[best] if rates[best] >= CLEAR * usual else 0.0


def _by_responses(gains: Mapping[int, np.ndarray], needed: float) -> tuple[int, float, np.ndarray]:
    """The offset that is `CLEAR` times ahead of the others in the responses that collect most, and those (rows,).

    0 unless the responses in which some offset is ahead collect what is needed together.
    """
    table = np.stack(list(gains.values()))
    first = table.argmax(0)
    ahead = (table.max(0) >= ALONE) & (table.max(0) >= CLEAR * np.median(table, 0))
    won = np.array([table[place, ahead & (first == place)].sum() for place in range(len(table))])
    place = int(won.argmax())
    gain = float(won[place]) if won.sum() >= needed else 0.0
    return list(gains)[place], gain, ahead & (first == place)


def _trimmed(inside: np.ndarray, row: np.ndarray, offset: int) -> np.ndarray:
    """Stretches without the `|offset|` tokens whose partner lies beyond the stretch's end, in the other part."""
    kept = inside.copy()
    for k in range(1, abs(offset) + 1):
        if offset < 0:
            kept[k:] &= inside[:-k] & (row[k:] == row[:-k])
            kept[:k] = False
        else:
            # At the end of a response there is no other part.
            kept[:-k] &= inside[k:] | (row[k:] != row[:-k])
    return kept


def _score(tokens: Tokens, own: np.ndarray, offset: int) -> tuple[np.ndarray, np.ndarray]:
    """How much closer the partner is than the own value, and where there is a partner."""
    partner, real = _partner(tokens, offset)
    other = np.minimum(np.abs(tokens.behavior - tokens.trainer[partner]), CAP)
    return np.where(real, own - other, -CAP), real


def _partner(tokens: Tokens, offset: int) -> tuple[np.ndarray, np.ndarray]:
    """Index of the token `offset` places on in the same response, and whether there is one."""
    index = np.arange(len(tokens)) + offset
    partner = np.clip(index, 0, len(tokens) - 1)
    real = (index == partner) & (tokens.row[partner] == tokens.row)
    return partner, real


def _stretches(score: np.ndarray, row: np.ndarray, least: float) -> tuple[np.ndarray, np.ndarray]:
    """The best-scoring stretch of every response that has one worth counting: the gain of each response (0 for none),
    and the tokens in them."""
    inside = np.zeros(len(score), dtype=bool)
    # Only a response with gains enough can hold a stretch; most have none and cost nothing.
    hopeful = np.bincount(row, np.maximum(score, 0.0)) >= least
    gains = np.zeros(len(hopeful))
    edges = np.flatnonzero(np.diff(row, prepend=-1, append=-1))
    for start, stop in itertools.pairwise(edges):
        if not hopeful[row[start]]:
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
