"""Detects `retokenized` from a few large differences among otherwise small ones.

Text that was decoded and encoded again gives the trainer other tokens than were sampled, at few positions, mostly at
boundaries of turns. There a log-prob jumps by nats; noise moves a logit by a few of its own scales. A jump is

  * isolated: |logit shift| beyond `jump-scales` times the scale of the data, and |log-ratio| beyond `jump-log-ratio`,
    with few tokens between these and `jump-tail-scales` times the scale, where a heavy tail has many; or
  * at a boundary: beyond `jump-boundary-scales` times that scale around the beginning of a turn, if the rate there is
    `jump-rate` times that elsewhere, with a binomial tail below 1e-6.

Jumps are removed before anything else is measured.
"""

from __future__ import annotations

import math

import numpy as np

from trimtab.diagnosis.causes.evidence import LogprobPairs, confidence, share
from trimtab.diagnosis.causes.what_is_left import Context, Finding
from trimtab.diagnosis.thresholds import THRESHOLDS as LIMITS

FIRST_TOKENS = 3  # of a turn, that count as its beginning
FIX = (
    "Train on the token ids the sampler returned. Never decode and encode a conversation again between turns; append "
    "new tokens to the old ids."
)


def find_retokenized(tokens: LogprobPairs, _context: Context) -> list[Finding]:
    """Finds jumps in data of several turns, and leaves them out."""
    if not tokens.in_later_turn.any():
        return []
    shift, log_ratio = np.abs(tokens.shift), np.abs(tokens.log_ratio)
    opening = tokens.in_later_turn & (tokens.since_boundary < FIRST_TOKENS)
    opening[:-1] |= (tokens.in_later_turn & (tokens.since_boundary == 0))[1:]  # and the last token of the turn before
    middle = tokens.middle & ~opening
    if middle.sum() < 20:
        return []
    # A high quantile, since tokens of several ages or steps, with different scales, may be mixed.
    scale = max(float(np.quantile(shift[middle], 0.8)) / 1.28, LIMITS["jump-least-scale"])
    far = (shift > LIMITS["jump-scales"] * scale) & (log_ratio > LIMITS["jump-log-ratio"])
    between = int(((shift > LIMITS["jump-tail-scales"] * scale) & ~far).sum())
    loose = (shift > LIMITS["jump-boundary-scales"] * scale) & (log_ratio > 1.0)
    boundary = _concentrated(loose, opening)
    jumps = far | (loose & opening if boundary else far)
    count = int(jumps.sum())
    certain = bool((far & (shift > 100 * scale) & (log_ratio > 5)).any())
    # A heavy tail decreases steadily; jumps are separated from the rest by a gap.
    apart = count >= LIMITS["jump-gap"] * between
    if not 0 < share(jumps) < LIMITS["jump-most"] or not (boundary or (apart and (count >= 2 or certain))):
        return []
    size = float(np.median(log_ratio[jumps]))
    where = (
        f", {share(loose[opening]):.1%} of the last token before a turn and its first {FIRST_TOKENS} against "
        f"{share(loose[~opening]):.2%} elsewhere"
        if boundary
        else ""
    )
    evidence = (
        f"{count} of {len(tokens)} tokens jump by {size:.1f} nats (median) where the rest moves by {scale:.2g} in "
        f"logits{where}"
    )
    sure = confidence(float(count) * (3 if boundary else 1), 1.5)
    return [Finding("retokenized", evidence, FIX, tokens.select(~_near(jumps, tokens)), count, sure)]


def _concentrated(jumps: np.ndarray, opening: np.ndarray) -> bool:
    """Whether the rate of jumps at boundaries is significantly above that elsewhere (binomial tail, Chernoff bound)."""
    trials, hits = int(opening.sum()), int((jumps & opening).sum())
    elsewhere = (float((jumps & ~opening).sum()) + 1.0) / (float((~opening).sum()) + 1.0)
    if trials == 0 or hits < 3 or hits / trials < LIMITS["jump-rate"] * elsewhere:
        return False
    tail = hits * math.log(hits / trials / elsewhere) - (hits - trials * elsewhere)
    return tail > 6 * math.log(10)


def _near(jumps: np.ndarray, tokens: LogprobPairs) -> np.ndarray:
    """Returns the jumps and the two tokens after each, whose context changed too."""
    near = jumps.copy()
    for k in (1, 2):
        near[k:] |= jumps[:-k] & (tokens.row[k:] == tokens.row[:-k])
    return near
