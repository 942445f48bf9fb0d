"""Locates where a shift of log-probs begins: at the response, at a later turn, or elsewhere.

A conversation that was decoded and encoded again between turns has other lengths from there on, so every later token is
paired with a neighbor's log-prob while the first turn fits. For each response two hypotheses are compared by what the
offset collects from a place to the end of the response (scores of `misaligned.py`): from its first token, and from the
best beginning of a later turn. Over all shifted responses a turn must collect `AHEAD` nats more than the whole response
does, and `REACHED` of what the best place anywhere would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trimtab.diagnosis.causes.evidence import Tokens

AHEAD, REACHED = 12.0, 0.85


@dataclass(frozen=True)
class Begin:
    """Where the shift of one response begins: a turn, counted from 1, and the position of its first token in the
    response, masked tokens counted."""

    turn: int
    place: int


def turn_numbers(tokens: Tokens) -> np.ndarray:
    """The turn each token belongs to, counted from 1 in its response; a turn is a stretch without masked tokens."""
    begin = tokens.place - tokens.turn
    first = np.diff(tokens.row, prepend=-1) != 0
    new = first | (np.diff(begin, prepend=-1) != 0)
    count = np.cumsum(new)
    return count - (count - 1)[np.maximum.accumulate(np.where(first, np.arange(len(first)), 0))]


def begins_of(tokens: Tokens, score: np.ndarray, rows: np.ndarray) -> list[Begin]:
    """The later turns at which the shift begins in the responses `rows`; empty where it begins with them or elsewhere.

    score: of every token, how much closer its shifted partner is than its own value.
    """
    turn = turn_numbers(tokens)
    whole = later = anywhere = 0.0
    begins = []
    starts = np.searchsorted(tokens.row, rows)
    stops = np.searchsorted(tokens.row, rows, side="right")
    for start, stop in zip(starts, stops, strict=True):
        # What is collected from each token to the end of the response.
        rest = np.cumsum(score[start:stop][::-1])[::-1]
        new = np.flatnonzero(np.diff(turn[start:stop], prepend=turn[start]))
        whole += float(rest[0])
        anywhere += float(rest.max())
        if not len(new):
            later += float(min(rest[0], 0.0))
            continue
        best = new[np.argmax(rest[new])]
        later += float(rest[best])
        begins.append(Begin(int(turn[start + best]), int(tokens.place[start + best])))
    return begins if later >= whole + AHEAD and later >= REACHED * anywhere else []


def begins_text(begins: Sequence[Begin], rows: int) -> str:
    """The commonest turn among them and where that is, of so many shifted responses."""
    common = int(np.argmax(np.bincount([begin.turn for begin in begins])))
    places = [begin.place for begin in begins if begin.turn == common]
    of = "all" if len(places) == rows else f"{len(places)} of {rows}"
    where = f"where turn {common} begins (position {int(np.median(places))}, median)"
    return f"the shift begins {where} in {of} shifted responses"
