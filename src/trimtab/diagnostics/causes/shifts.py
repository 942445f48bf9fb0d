"""`misaligned`: the two lists of log-probs belong to different tokens.

For every offset s the score of a token is min(|b_t - p_t|, 3) - min(|b_t - p_(t+s)|, 3): how much closer the
trainer's neighbor is than its own. On aligned data it is negative on average, so the best stretch of a response
collects next to nothing; on a shifted stretch it collects the whole difference. A shift is named when

  * its stretches collect at least `LEAST` nats and `CLEAR` times what the other offsets collect by accident, and
  * inside them the shifted log-probs agree far better (`FIT` of the distance, correlation `TIE`).

Found stretches are repaired, so that what else is wrong still shows, and the search is repeated: different responses
may be shifted differently. What no offset restores may still be the log-probs of another response of equal length.
"""

from __future__ import annotations

import itertools

import numpy as np

from trimtab.diagnostics.causes.evidence import Tokens, sureness
from trimtab.diagnostics.diagnosis import Cause

OFFSETS = tuple(s for k in range(1, 9) for s in (k, -k))
CAP, STRETCH, LEAST, CLEAR, FIT, TIE = 3.0, 3.0, 12.0, 3.0, 0.4, 0.75
ROUNDS = 4
FIX = (
    "Pair each sampled token with its own log-prob: logits at position t predict token t + 1, and both lists start at "
    "the first response token."
)


def find_shifts(tokens: Tokens) -> tuple[Cause | None, Tokens]:
    """The cause, if found, and the tokens with its stretches repaired."""
    found: list[tuple[int, int, int, float]] = []
    total, size = tokens, len(tokens)
    for _ in range(ROUNDS):
        step = _best(total)
        if step is None:
            break
        offset, inside, gain, partner = step
        found.append((offset, int(inside.sum()), len(np.unique(total.row[inside])), gain))
        trainer = np.where(inside, total.trainer[partner], total.trainer)
        # The shift has pushed one value per offset out of each stretch: what it touched at the edges has no partner.
        total = total.repaired(trainer, ~_orphaned(inside, total, offset))
    if not found:
        return None, tokens
    offset, moved, rows, gain = max(found, key=lambda one: one[3])
    others = f" (and {', '.join(f'{one[0]:+d}' for one in found if one[0] != offset)})" if len(found) > 1 else ""
    evidence = (
        f"the trainer's log-probs agree with the sampler's when moved by {offset:+d}{others}: {moved} of {size} "
        f"tokens in {rows} of {len(np.unique(tokens.row))} responses fit their neighbor's value, {gain:.0f} nats closer"
    )
    return Cause("misaligned", sureness(gain, LEAST), evidence, FIX), total


def _best(tokens: Tokens) -> tuple[int, np.ndarray, float, np.ndarray] | None:
    """The offset that explains most: with the tokens inside its stretches, nats collected and partner of each token."""
    own = np.minimum(np.abs(tokens.log_ratio), CAP)
    if own.sum() < LEAST:
        return None
    gains, inside, partners = {}, {}, {}
    for offset in OFFSETS:
        partner, real = _partner(tokens, offset)
        other = np.minimum(np.abs(tokens.behavior - tokens.trainer[partner]), CAP)
        score = np.where(real, own - other, -CAP)
        gains[offset], inside[offset] = _stretches(score, tokens.row)
        inside[offset] &= real
        partners[offset] = partner
    best = max(gains, key=lambda s: gains[s])
    usual = float(np.median([gain for s, gain in gains.items() if s != best]))
    chosen = inside[best]
    if gains[best] < LEAST or gains[best] < CLEAR * usual or chosen.sum() < 6:
        return None
    behavior, moved = tokens.behavior[chosen], tokens.trainer[partners[best]][chosen]
    near = np.minimum(np.abs(behavior - moved), CAP).mean()
    if near > FIT * own[chosen].mean() or _correlation(behavior, moved) < TIE:
        return None
    return best, chosen, gains[best], partners[best]


def _partner(tokens: Tokens, offset: int) -> tuple[np.ndarray, np.ndarray]:
    """Index of the token `offset` places on in the same response, and whether there is one."""
    index = np.arange(len(tokens)) + offset
    partner = np.clip(index, 0, len(tokens) - 1)
    real = (index == partner) & (tokens.row[partner] == tokens.row)
    return partner, real


def _stretches(score: np.ndarray, row: np.ndarray) -> tuple[float, np.ndarray]:
    """The best-scoring stretch of every response that has one worth counting: their total, and the tokens in them."""
    inside, total = np.zeros(len(score), dtype=bool), 0.0
    # Only a response with gains enough can hold a stretch; most have none and cost nothing.
    hopeful = np.bincount(row, np.maximum(score, 0.0)) >= STRETCH
    edges = np.flatnonzero(np.diff(row, prepend=-1, append=-1))
    for start, stop in itertools.pairwise(edges):
        if not hopeful[row[start]]:
            continue
        running = np.concatenate([[0.0], np.cumsum(score[start:stop])])
        lowest = np.minimum.accumulate(running)
        end = int(np.argmax(running - lowest))
        gain = running[end] - lowest[end]
        if gain >= STRETCH:
            begin = int(np.argmin(running[: end + 1]))
            inside[start + begin : start + end] = True
            total += float(gain)
    return total, inside


def _orphaned(inside: np.ndarray, tokens: Tokens, offset: int) -> np.ndarray:
    """Tokens within `offset` places of a repaired stretch's edge, outside of it."""
    near = np.zeros(len(inside), dtype=bool)
    for k in range(1, abs(offset) + 1):
        near[k:] |= inside[:-k] & (tokens.row[:-k] == tokens.row[k:])
        near[:-k] |= inside[k:] & (tokens.row[:-k] == tokens.row[k:])
    return near & ~inside


def _correlation(left: np.ndarray, right: np.ndarray) -> float:
    if len(left) < 3 or left.std() == 0 or right.std() == 0:
        return 0.0
    return float(np.corrcoef(left, right)[0, 1])
