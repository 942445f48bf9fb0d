"""`misaligned`: the two lists of log-probs belong to different tokens.

For every offset s the score of a token is min(|b_t - p_t|, 3) - min(|b_t - p_(t+s)|, 3): how much closer the
trainer's neighbor is than its own. On aligned data it is negative on average, so the best stretch of a response
collects next to nothing; on a shifted stretch it collects the whole difference. A shift is named when

  * its stretches collect at least `LEAST` nats, `PART` of all the distance there is, and `CLEAR` times what the other
    offsets collect by accident, and
  * inside them the shifted log-probs agree far better (`FIT` of the distance, correlation `TIE`).

Where responses are too short or too certain for stretches, the score of all tokens together decides: it is above 0, by
`CERTAIN` standard errors, only for lists that are shifted as a whole.

Found stretches are repaired, so that what else is wrong still shows, and the other responses are searched again: they
may be shifted differently. What no offset restores may still be the log-probs of another response of equal length.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from trimtab.diagnostics.causes.evidence import Tokens, joined, sureness, z_of
from trimtab.diagnostics.diagnosis import Cause

OFFSETS = tuple(s for k in range(1, 9) for s in (k, -k))
CAP, STRETCH, LEAST, CLEAR, FIT, TIE, PART = 3.0, 3.0, 12.0, 3.0, 0.65, 0.75, 0.22
CERTAIN = 6.0
INFORMS = 2.0  # nats of surprise in a response that could show its shift
ROUNDS = 4
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
    return Cause("misaligned", sureness(most.gain, LEAST), evidence, FIX), joined([fine, left]) if clean else fine


def _distance(tokens: Tokens) -> float:
    return float(np.minimum(np.abs(tokens.log_ratio), CAP).mean()) if len(tokens) else 0.0


@dataclass(frozen=True, eq=False)
class _Found:
    offset: int
    gain: float
    rows: int
    inside: np.ndarray
    partner: np.ndarray


def _best(tokens: Tokens) -> _Found | None:
    """The offset that explains most, and every stretch it repairs."""
    own = np.minimum(np.abs(tokens.log_ratio), CAP)
    if own.sum() < LEAST:
        return None
    gains, rates, wholes = {}, {}, {}
    for offset in OFFSETS:
        score, real = _score(tokens, own, offset)
        gains[offset], _ = _stretches(score, tokens.row, STRETCH)
        # Far offsets have fewer pairs to be lucky with.
        rates[offset] = gains[offset] / max(int(real.sum()), 1)
        wholes[offset] = float(score[real].sum()) if z_of(score[real]) > CERTAIN else 0.0
    needed = max(LEAST, PART * own.sum())
    best, gain = _by_stretches(gains, rates)
    together = gain < needed
    if together:
        best = max(wholes, key=lambda s: wholes[s])
        gain = wholes[best]
    if gain < needed:
        return None
    score, real = _score(tokens, own, best)
    chosen = real if together else _stretches(score, tokens.row, STRETCH)[1] & real
    partner, _ = _partner(tokens, best)
    behavior, moved = tokens.behavior[chosen], tokens.trainer[partner][chosen]
    near = np.minimum(np.abs(behavior - moved), CAP).mean() if chosen.sum() >= 6 else CAP
    if near > FIT * own[chosen].mean() or _correlation(behavior, moved) < TIE:
        return None
    # Once the offset is known, a stretch too short to prove it still shows it.
    inside = _trimmed(_stretches(score, tokens.row, STRETCH / 10)[1] & real, tokens.row, best)
    if inside.sum() < 6:
        return None
    return _Found(best, gain, len(np.unique(tokens.row[inside])), inside, partner)


def _by_stretches(gains: Mapping[int, float], rates: Mapping[int, float]) -> tuple[int, float]:
    """The offset that collects most, with 0 unless it is `CLEAR` times ahead of the others."""
    best = max(gains, key=lambda s: gains[s])
    usual = float(np.median([rate for s, rate in rates.items() if s != best]))
    return best, gains[best] if rates[best] >= CLEAR * usual else 0.0


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


def _stretches(score: np.ndarray, row: np.ndarray, least: float) -> tuple[float, np.ndarray]:
    """The best-scoring stretch of every response that has one worth counting: their total, and the tokens in them."""
    inside, total = np.zeros(len(score), dtype=bool), 0.0
    # Only a response with gains enough can hold a stretch; most have none and cost nothing.
    hopeful = np.bincount(row, np.maximum(score, 0.0)) >= least
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
            total += float(gain)
    return total, inside


def _correlation(left: np.ndarray, right: np.ndarray) -> float:
    if len(left) < 3 or left.std() == 0 or right.std() == 0:
        return 0.0
    return float(np.corrcoef(left, right)[0, 1])
