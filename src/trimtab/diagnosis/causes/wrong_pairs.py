"""Detects log-probs that are paired with the wrong tokens: `misaligned` and `retokenized`.

Shifts (`find_shifts`). For every offset s, the score of token t is min(|b_t - p_t|, 3) - min(|b_t - p_(t+s)|, 3): how
much closer the trainer's log-prob is at the neighbor than at the token itself. On aligned data the score is negative on
average, and its maximal sum over a stretch of a response is near 0. On a shifted stretch the sum is the whole
difference. Such stretches are repaired, and the remaining responses are searched again, since they may have another
shift. A shift that begins at a later turn is `retokenized` (`find_shift_starts`): the text has another number of tokens
when it is encoded again, so every later token is paired with a neighbor's log-prob, while the first turn fits. Any
other shift is `misaligned`.

Jumps (`find_retokenized`). If text is decoded and encoded again, the trainer gets other tokens than were sampled, at
few positions, mostly at boundaries of turns. There a log-prob jumps by nats; noise moves a logit by a few usual sizes.
Either jumps are isolated: few tokens lie between them and the rest, unlike in a heavy tail. Or they are at boundaries,
where the rate of smaller jumps is far above the rate elsewhere (a binomial tail below 1e-6). Jumps are removed before
anything else is measured.

Lists of another response (`find_swapped_responses`). If the log-probs of a response disagree, it is compared with the
trainer's lists of all responses of equal length. Its true list must fit far better than the present and the second best
list, since among thousands of short, near-certain responses some list always fits slightly better. If the true list is
lost, two responses have the same list of the trainer, to the last digit, and it is wrong for the response that
disagrees. If the policy has really changed, few of the responses that disagree have such lists.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from trimtab.diagnosis.causes.detector import CauseMatch, Context, LogprobPairs, confidence, correlation, share, z_of

MIN_GAIN = 12.0  # nats that all stretches of an offset must gain
MIN_DISTANCE_PART = 0.22  # least part of all distance that an offset must gain
MIN_LEAD = 3.0  # least ratio of the gain to that of the other offsets
MAX_DISTANCE_LEFT = 0.65  # part of the distance that an offset may leave
MIN_LIST_CORRELATION = 0.75  # least correlation of the shifted lists
MIN_STRETCH_GAIN = 3.0  # nats that a stretch must gain
MIN_RESPONSE_GAIN = 6.0  # nats that the offset of a single response must gain
MAX_RESPONSE_LEFT = 0.25  # part of its distance that the offset of a single response may leave
MAX_OTHER = 0.15  # share of the gain that other offsets may have before responses are decided one by one
WHOLE_Z = 6.0  # standard errors of the mean gain where no stretch is long enough
MIN_SURPRISE = 2.0  # nats of surprise that a response needs to show its shift

OFFSETS = tuple(s for k in range(1, 9) for s in (k, -k))
CAP = 3.0  # nats: a difference beyond it counts as this much
MAX_ROUNDS = 8  # most offsets of one data set


def find_shifts(tokens: LogprobPairs, _context: Context) -> list[CauseMatch]:
    """Finds shifts, and repairs the shifted stretches."""
    shifts: list[_Shift] = []
    remaining, parts = tokens, []
    while len(shifts) < MAX_ROUNDS and (shift := _best_shift(remaining)) is not None:
        shifts.append(shift)
        parts.append(remaining.repaired(remaining.trainer[shift.partner], shift.inside))
        # Tokens around a stretch have lost their partners, so its whole response is removed from the search.
        remaining = remaining.select(~np.isin(remaining.row, remaining.row[shift.inside]))
    if not shifts:
        return []
    repaired = LogprobPairs.concat(parts)
    rows = sum(shift.rows for shift in shifts)
    # Responses too short or too certain to show their shift would look like noise, so the remaining tokens are
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
        common = int(np.argmax(np.bincount([turn for turn, _ in starts])))
        positions = [position for turn, position in starts if turn == common]
        name = "retokenized"
        evidence += (
            f"; the shift begins where turn {common + 1} begins (position {int(np.median(positions))}, median) in "
            f"{len(positions)} of {rows} shifted responses"
        )
    return [CauseMatch(name, evidence, rest, len(repaired), confidence(shifts[0].gain, MIN_GAIN))]


def _distance(tokens: LogprobPairs) -> np.ndarray:
    return np.minimum(np.abs(tokens.log_ratio), CAP)


@dataclass(frozen=True, eq=False)
class _Shift:
    """An offset between the two lists, and the tokens that it repairs."""

    offset: int
    gain: float  # in nats
    rows: int  # number of repaired responses
    inside: np.ndarray  # bool (tokens,): the repaired tokens
    partner: np.ndarray  # (tokens,): index of the token `offset` positions later
    starts: list[tuple[int, int]]  # by response, where the shift begins: turn (from 0), position in the response


class _Candidate(NamedTuple):
    """An offset that may explain the data."""

    offset: int
    gain: float  # in nats
    is_significant: bool  # whether the gain is large enough
    eligible: np.ndarray | None  # bool (tokens,): tokens that may be repaired, in stretches that gain; None for all
    max_left: float  # part of its distance that the offset may leave


def _best_shift(tokens: LogprobPairs) -> _Shift | None:
    """Returns the offset with the largest gain and the stretches that it repairs; None if no gain is significant."""
    distance = _distance(tokens)
    if distance.sum() < MIN_GAIN:
        return None
    scores = [_score(tokens, distance, offset) for offset in OFFSETS]
    gains = np.stack([_find_stretches(score, tokens.row, MIN_STRETCH_GAIN)[0] for score, _ in scores])
    needed = max(MIN_GAIN, MIN_DISTANCE_PART * distance.sum())

    # Stretches anywhere. Gains are compared per pair, since far offsets have fewer pairs.
    rates = gains.sum(1) / [max(int(real.sum()), 1) for _, real in scores]
    best = int(gains.sum(1).argmax())
    is_ahead = rates[best] >= MIN_LEAD * np.median(np.delete(rates, best))
    gain, everywhere = float(gains[best].sum()), np.ones(len(tokens), dtype=bool)
    by_stretches = _Candidate(OFFSETS[best], gain, is_ahead and gain >= needed, everywhere, MAX_DISTANCE_LEFT)

    # Responses in which one offset is far ahead of the others; together they must gain as much.
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
    by_all_tokens = _Candidate(OFFSETS[best], wholes[best], wholes[best] >= needed, None, MAX_DISTANCE_LEFT)

    # If responses have different offsets, the first offset anywhere would also take stretches of the others.
    first, second = (by_responses, by_stretches) if has_others else (by_stretches, by_responses)
    for candidate in (first, second, by_all_tokens):
        if candidate.is_significant and (shift := _fit_shift(tokens, distance, candidate)) is not None:
            return shift
    return None


def _fit_shift(tokens: LogprobPairs, distance: np.ndarray, candidate: _Candidate) -> _Shift | None:
    """Returns the shift by the candidate's offset if the tokens agree far better after it, else None."""
    offset, eligible = candidate.offset, candidate.eligible
    score, real = _score(tokens, distance, offset)
    score = score if eligible is None else np.where(eligible, score, -CAP)
    chosen = real if eligible is None else _find_stretches(score, tokens.row, MIN_STRETCH_GAIN)[1] & real
    partner, _ = _find_partners(tokens, offset)
    behavior, moved = tokens.behavior[chosen], tokens.trainer[partner][chosen]
    near = np.minimum(np.abs(behavior - moved), CAP).mean() if chosen.sum() >= 6 else CAP
    if near > candidate.max_left * distance[chosen].mean() or correlation(behavior, moved) < MIN_LIST_CORRELATION:
        return None
    # Once the offset is known, stretches too short to establish it are repaired as well.
    inside = _trim(_find_stretches(score, tokens.row, MIN_STRETCH_GAIN / 10)[1] & real, tokens.row, offset)
    # Across masked tokens, the neighboring trained token is not at that offset: such pairs stay unrepaired.
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
    """Returns how much closer the partner's value is than the token's own value, and where a partner exists."""
    partner, real = _find_partners(tokens, offset)
    other = np.minimum(np.abs(tokens.behavior - tokens.trainer[partner]), CAP)
    return np.where(real, distance - other, -CAP), real


def _find_partners(tokens: LogprobPairs, offset: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the index of the token `offset` positions later in the same response, and whether there is one."""
    index = np.arange(len(tokens)) + offset
    partner = np.clip(index, 0, len(tokens) - 1)
    real = (index == partner) & (tokens.row[partner] == tokens.row)
    return partner, real


def _find_stretches(score: np.ndarray, row: np.ndarray, least: float) -> tuple[np.ndarray, np.ndarray]:
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
    """Returns whether jumps are significantly more frequent at boundaries (binomial tail, Chernoff bound)."""
    trials, hits = int(opening.sum()), int((jumps & opening).sum())
    elsewhere = (float((jumps & ~opening).sum()) + 1.0) / (float((~opening).sum()) + 1.0)
    if trials == 0 or hits < 3 or hits / trials < MIN_BOUNDARY_RATE * elsewhere:
        return False
    tail = hits * math.log(hits / trials / elsewhere) - (hits - trials * elsewhere)
    return tail > 6 * math.log(10)


def find_shift_starts(tokens: LogprobPairs, score: np.ndarray, rows: np.ndarray) -> list[tuple[int, int]]:
    """Returns the turn, and its position, at which the shift begins in each of `rows`; empty if it begins elsewhere.

    score: (tokens,), how much closer the shifted partner is than the token's own value. Two hypotheses are compared by
    the sum of scores to the end of the response: the shift begins at its first token, or at the best start of a later
    turn. Over all responses, turns must gain `MIN_TURN_LEAD` nats more than whole responses, and `MIN_TURN_PART` of the
    gain from the best position anywhere.
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
        found.append((int(turn[best]), int(tokens.position[start + best])))
    return found if later >= whole + MIN_TURN_LEAD and later >= MIN_TURN_PART * anywhere else []


MIN_OWN_DISTANCE = 0.3  # nats between a response's two lists from which on it disagrees
MAX_DISTANCE = 0.25  # largest distance of the right list, relative to the present one and the second best
MIN_RESPONSES = 4  # fewest responses that have another one's list
MIN_SHARE = 0.25  # least share of them among the responses that disagree
MAX_FIT = 3.0  # times the usual distance that a response with the right list may have
MAX_EQUAL = 0.05  # share of agreeing responses with equal lists above which equal lists say nothing
MIN_OWN_SURPRISE = 3.0  # nats of surprise that a response needs to be told from others

MAX_CANDIDATES = 500  # most responses of one length that are compared with each other


def find_swapped_responses(tokens: LogprobPairs, _context: Context) -> list[CauseMatch]:
    """Finds responses with the log-probs of another response; restores their own, or leaves the responses out."""
    edges = np.flatnonzero(np.diff(tokens.row, prepend=-1, append=-1))
    starts, lengths = edges[:-1], np.diff(edges)
    if len(starts) < 3:
        return []
    own_distance = np.add.reduceat(np.minimum(np.abs(tokens.log_ratio), CAP), starts) / lengths
    surprise = -np.add.reduceat(tokens.behavior, starts)
    told = (lengths >= 4) & (surprise > MIN_OWN_SURPRISE)  # whether a response can be told from others
    disagrees = told & (own_distance > MIN_OWN_DISTANCE)
    trainer = tokens.trainer.copy()
    restored, copied = np.zeros(len(starts), dtype=bool), np.zeros(len(starts), dtype=bool)
    for length in np.unique(lengths[disagrees]):
        equal = np.flatnonzero(lengths == length)[:MAX_CANDIDATES]
        if len(equal) < 3:
            continue
        index = starts[equal][:, None] + np.arange(length)
        values = tokens.trainer[index]
        copied[equal] = disagrees[equal] & _find_shared_lists(tokens, index, ~disagrees[equal])
        for i in np.flatnonzero(disagrees[equal]):
            distance = np.minimum(np.abs(tokens.behavior[index[i]] - values), CAP).mean(-1)
            owner, second = (int(row) for row in np.argpartition(distance, 1)[:2])
            if owner != i and distance[owner] < MAX_DISTANCE * min(own_distance[equal[i]], distance[second]):
                trainer[index[i]] = values[owner]
                restored[equal[i]] = True
    swapped = restored | copied
    found = int(swapped.sum())
    if found < max(MIN_RESPONSES, MIN_SHARE * disagrees.sum()):
        return []
    # Responses that are too certain to show a wrong list may have one, as may responses that fit worse than usual.
    after = np.add.reduceat(np.minimum(np.abs(trainer - tokens.behavior), CAP), starts) / lengths
    usual = np.median(after[restored]) if restored.any() else np.quantile(own_distance[told], 0.2)
    kept = restored | (told & (own_distance < MAX_FIT * usual + 0.01))
    evidence = (
        f"{found} of {len(starts)} responses have the trainer's log-probs of another response of equal length: "
        f"{int(restored.sum())} of them fit those far better than their own, {int(copied.sum())} have a list that "
        "another response has as well, to the last digit"
    )
    rest = tokens.repaired(trainer, np.repeat(kept, lengths))
    sure = confidence(found, MIN_RESPONSES)
    return [CauseMatch("misaligned", evidence, rest, int(lengths[swapped].sum()), sure)]


def _find_shared_lists(tokens: LogprobPairs, index: np.ndarray, agrees: np.ndarray) -> np.ndarray:
    """Returns which responses (responses,) share a list of the trainer with a different response.

    index: their tokens (responses, T). agrees: whether the two lists of a response agree. Without ids, responses are
    equal if the sampler's log-probs are; none is returned if responses that agree share lists too.
    """
    _, same, count = np.unique(tokens.trainer[index], axis=0, return_inverse=True, return_counts=True)
    same = same.reshape(-1)
    if tokens.ids is None and share(np.bincount(same[agrees])[same[agrees]] > 1) > MAX_EQUAL:
        return np.zeros(len(index), dtype=bool)
    text = np.round(tokens.behavior[index], 1) if tokens.ids is None else tokens.ids[index]
    _, text = np.unique(text, axis=0, return_inverse=True)
    both = np.stack([same, text.reshape(-1)], axis=1)
    _, equal, number = np.unique(both, axis=0, return_inverse=True, return_counts=True)
    return count[same] > number[equal.reshape(-1)]
