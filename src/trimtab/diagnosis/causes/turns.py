"""Locates where a shift of log-probs begins: at the response, at a later turn, or elsewhere.

A conversation that was decoded and encoded again between turns has other lengths from there on, so that every later
token is paired with a neighbor's log-prob while the first turn fits. For each response two hypotheses are compared by
the gain of the offset from a position to the end of the response (scores of `misaligned.py`): from its first token, and
from the best start of a later turn. Over all shifted responses, turns must gain `turn-lead` nats more than whole
responses, and `turn-reached` of the gain from the best position anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trimtab.diagnosis.causes.evidence import LogprobPairs
from trimtab.diagnosis.thresholds import THRESHOLDS as LIMITS


@dataclass(frozen=True)
class ShiftStart:
    """The start of the shift in one response: its turn, from 1, and the position of that turn's first token.

    Positions include masked tokens.
    """

    turn: int
    position: int


def turn_numbers(tokens: LogprobPairs) -> np.ndarray:
    """Returns the turn of each token, from 1; without a column of turns one is a stretch without masked tokens."""
    if tokens.table.turn is not None:
        return tokens.table.turn[tokens.index] + 1
    begin = tokens.position - tokens.since_boundary
    first = np.diff(tokens.row, prepend=-1) != 0
    new = first | (np.diff(begin, prepend=-1) != 0)
    count = np.cumsum(new)
    return count - (count - 1)[np.maximum.accumulate(np.where(first, np.arange(len(first)), 0))]


def find_shift_starts(tokens: LogprobPairs, score: np.ndarray, rows: np.ndarray) -> list[ShiftStart]:
    """Returns the turns at which the shift begins in the responses `rows`; empty if it begins elsewhere.

    score: (tokens,), how much closer the shifted partner is than the token's own value.
    """
    turn = turn_numbers(tokens)
    whole = later = anywhere = 0.0
    shift_starts = []
    starts = np.searchsorted(tokens.row, rows)
    stops = np.searchsorted(tokens.row, rows, side="right")
    for start, stop in zip(starts, stops, strict=True):
        # Gain from each token to the end of the response.
        rest = np.cumsum(score[start:stop][::-1])[::-1]
        new = np.flatnonzero(np.diff(turn[start:stop], prepend=turn[start]))
        whole += float(rest[0])
        anywhere += float(rest.max())
        if not len(new):
            later += float(min(rest[0], 0.0))
            continue
        best = new[np.argmax(rest[new])]
        later += float(rest[best])
        shift_starts.append(ShiftStart(int(turn[start + best]), int(tokens.position[start + best])))
    return shift_starts if later >= whole + LIMITS["turn-lead"] and later >= LIMITS["turn-reached"] * anywhere else []


def shift_starts_text(starts: Sequence[ShiftStart], rows: int) -> str:
    """Describes the most common turn and its position; `rows`: number of shifted responses."""
    common = int(np.argmax(np.bincount([start.turn for start in starts])))
    positions = [start.position for start in starts if start.turn == common]
    share = "all" if len(positions) == rows else f"{len(positions)} of {rows}"
    where = f"where turn {common} begins (position {int(np.median(positions))}, median)"
    return f"the shift begins {where} in {share} shifted responses"
