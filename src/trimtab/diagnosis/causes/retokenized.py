"""Detects `retokenized` from a few large differences, and where a shift of log-probs begins with a turn.

Text that was decoded and encoded again gives the trainer other tokens than were sampled, at few positions, mostly at
boundaries of turns. There a log-prob jumps by nats; noise moves a logit by a few usual sizes. A jump is

  * isolated: |logit shift| beyond `MIN_JUMP` times the scale of the data, and |log-ratio| beyond `MIN_LOG_RATIO`,
    with few tokens between these and `MIN_TAIL` times the scale, where a heavy tail has many; or
  * at a boundary: beyond `MIN_BOUNDARY_JUMP` times that scale around the beginning of a turn, if the rate there is
    `MIN_BOUNDARY_RATE` times that elsewhere, with a binomial tail below 1e-6.

Jumps are removed before anything else is measured.

If the text has another number of tokens when it is encoded again, every later token is paired with a neighbor's
log-prob while the first turn fits (`find_shift_starts`, for the shifts that `misaligned.py` finds).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from trimtab.diagnosis.causes.detector import CauseMatch, Context
from trimtab.diagnosis.causes.evidence import confidence, share
from trimtab.diagnosis.causes.logprob_pairs import LogprobPairs

MIN_JUMP = 25.0  # usual sizes beyond which a token jumps
MIN_LOG_RATIO = 1.5  # nats that it jumps at least
MIN_TAIL = 8.0  # usual sizes from which on a token belongs to a tail
MIN_GAP = 0.35  # fewest jumps for each token of that tail: a heavy tail has fewer
MIN_BOUNDARY_JUMP = 6.0  # usual sizes of a jump where a turn begins
MIN_BOUNDARY_RATE = 5.0  # times as many jumps at turn boundaries as elsewhere
MIN_SCALE = 0.03  # nats: least usual size
MAX_JUMPS = 0.15  # most tokens that jump: more are not an exception
MIN_TURN_LEAD = 12.0  # nats that shifts from a turn on must gain more than shifts of whole responses
MIN_TURN_PART = 0.85  # part of the gain from the best position anywhere

FIRST_TOKENS = 3  # of a turn, that count as its beginning


def find_retokenized(tokens: LogprobPairs, _context: Context) -> list[CauseMatch]:
    """Finds jumps in data of several turns, and leaves them out."""
    is_later = tokens.turn > 0
    if not is_later.any():
        return []
    shift, log_ratio = np.abs(tokens.shift), np.abs(tokens.log_ratio)
    opening = is_later & (tokens.since_turn < FIRST_TOKENS)
    opening[:-1] |= (is_later & (tokens.since_turn == 0))[1:]  # and the last token of the turn before
    undecided = tokens.undecided & ~opening
    if undecided.sum() < 20:
        return []
    # A high quantile, since tokens of several ages or steps, with different scales, may be mixed.
    scale = max(float(np.quantile(shift[undecided], 0.8)) / 1.28, MIN_SCALE)
    far = (shift > MIN_JUMP * scale) & (log_ratio > MIN_LOG_RATIO)
    between = int(((shift > MIN_TAIL * scale) & ~far).sum())
    loose = (shift > MIN_BOUNDARY_JUMP * scale) & (log_ratio > 1.0)
    at_boundary = _is_concentrated(loose, opening)
    jumps = far | (loose & opening if at_boundary else far)
    count = int(jumps.sum())
    certain = bool((far & (shift > 100 * scale) & (log_ratio > 5)).any())
    # A heavy tail decreases steadily; jumps are separated from the rest by a gap.
    apart = count >= MIN_GAP * between
    if not 0 < share(jumps) < MAX_JUMPS or not (at_boundary or (apart and (count >= 2 or certain))):
        return []
    evidence = (
        f"{count} of {len(tokens)} tokens differ by {np.median(log_ratio[jumps]):.1f} nats (median), logits of others "
        f"by {scale:.2g}: these are {share(jumps[opening]):.1%} of the tokens where a turn begins and "
        f"{share(jumps[~opening]):.2%} of the others"
    )
    sure = confidence(float(count) * (3 if at_boundary else 1), 1.5)
    near = jumps.copy()  # and the two tokens after each, whose context changed too
    for k in (1, 2):
        near[k:] |= jumps[:-k] & (tokens.row[k:] == tokens.row[:-k])
    return [CauseMatch("retokenized", evidence, tokens.select(~near), count, sure)]


def _is_concentrated(jumps: np.ndarray, opening: np.ndarray) -> bool:
    """Whether the rate of jumps at boundaries is significantly above that elsewhere (binomial tail, Chernoff bound)."""
    trials, hits = int(opening.sum()), int((jumps & opening).sum())
    elsewhere = (float((jumps & ~opening).sum()) + 1.0) / (float((~opening).sum()) + 1.0)
    if trials == 0 or hits < 3 or hits / trials < MIN_BOUNDARY_RATE * elsewhere:
        return False
    tail = hits * math.log(hits / trials / elsewhere) - (hits - trials * elsewhere)
    return tail > 6 * math.log(10)


class ShiftStart(NamedTuple):
    """Where the shift of one response begins: the turn, from 0, and the position of its first trained token."""

    turn: int
    position: int


def find_shift_starts(tokens: LogprobPairs, score: np.ndarray, rows: np.ndarray) -> list[ShiftStart]:
    """Returns the turns at which the shift begins in the responses `rows`; empty if it begins elsewhere.

    score: (tokens,), how much closer the shifted partner is than the token's own value. For each response two
    hypotheses are compared by the score from a position to the end of the response: from its first token, and from the
    best start of a later turn. Over all responses, turns must gain `MIN_TURN_LEAD` nats more than whole responses, and
    `MIN_TURN_PART` of the gain from the best position anywhere.
    """
    whole = later = anywhere = 0.0
    found = []
    starts = np.searchsorted(tokens.row, rows)
    stops = np.searchsorted(tokens.row, rows, side="right")
    for start, stop in zip(starts, stops, strict=True):
        turn = tokens.turn[start:stop]
        rest = np.cumsum(score[start:stop][::-1])[::-1]  # from each token to the end of the response
        new = np.flatnonzero(np.diff(turn, prepend=turn[0]))
        whole += float(rest[0])
        anywhere += float(rest.max())
        if not len(new):
            later += float(min(rest[0], 0.0))
            continue
        best = new[np.argmax(rest[new])]
        later += float(rest[best])
        found.append(ShiftStart(int(turn[best]), int(tokens.position[start + best])))
    return found if later >= whole + MIN_TURN_LEAD and later >= MIN_TURN_PART * anywhere else []


def shift_starts_text(starts: Sequence[ShiftStart], rows: int) -> str:
    """Describes the most common turn and its position; `rows`: number of shifted responses."""
    common = int(np.argmax(np.bincount([start.turn for start in starts])))
    positions = [start.position for start in starts if start.turn == common]
    return (
        f"the shift begins where turn {common + 1} begins (position {int(np.median(positions))}, median) in "
        f"{len(positions)} of {rows} shifted responses"
    )
