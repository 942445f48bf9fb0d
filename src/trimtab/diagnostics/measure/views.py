"""Views whose bins need one look at a token: behavior probability, position, entropy, turn."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from trimtab.diagnostics.diagnosis import View
from trimtab.diagnostics.measure.bins import PROBABILITY_BINS, PROBABILITY_EDGES
from trimtab.diagnostics.measure.cut import Cut
from trimtab.diagnostics.measure.trained import Trained
from trimtab.diagnostics.tokens import DECILES, deciles

_ENTROPY_EDGES = np.array([0.0, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_REACH = 3  # tokens either side of a turn's boundary
_TURNS = 8


class Part(Protocol):
    """Something gathered chunk by chunk and shown at the end; None when the data has nothing to show."""

    def add(self, tokens: Trained) -> None: ...

    def view(self) -> View | None: ...


class ByProbability:
    def __init__(self) -> None:
        self._cut = Cut(PROBABILITY_BINS)

    def add(self, tokens: Trained) -> None:
        self._cut.add(tokens.probability_bin, tokens)

    def view(self) -> View:
        ends = [f"{edge:.2g}" for edge in PROBABILITY_EDGES]
        labels = [f"{low} - {high}" for low, high in zip(ends[:-1], ends[1:], strict=True)]
        labels[0] = f"below {ends[1]}"
        return self._cut.view("probability", labels, PROBABILITY_EDGES)


class ByPosition:
    """The tenth of its response a token lies in, untrained tokens included in the response."""

    def __init__(self) -> None:
        self._cut = Cut(DECILES)

    def add(self, tokens: Trained) -> None:
        self._cut.add(deciles(tokens.chunk.starts)[tokens.places], tokens)

    def view(self) -> View:
        labels = [f"{10 * tenth}-{10 * tenth + 10}%" for tenth in range(DECILES)]
        return self._cut.view("position", labels, np.linspace(0.0, 1.0, DECILES + 1))


class ByEntropy:
    """Entropy of the sampler, in nats. A token whose entropy is not known is left out, and counted."""

    def __init__(self) -> None:
        self._cut = Cut(len(_ENTROPY_EDGES))
        self._largest = 0.0
        self._unknown = 0

    def add(self, tokens: Trained) -> None:
        if tokens.chunk.entropy is None:
            return
        entropy = tokens.at_tokens(tokens.chunk.entropy)
        known = np.flatnonzero(np.isfinite(entropy))
        self._unknown += len(entropy) - len(known)
        if not len(known):
            return
        entropy = np.maximum(entropy[known], 0.0)
        self._largest = max(self._largest, float(entropy.max()))
        self._cut.add(np.searchsorted(_ENTROPY_EDGES, entropy, side="right") - 1, tokens, known)

    def view(self) -> View | None:
        used = np.flatnonzero(self._cut.count)
        if not len(used):
            return None
        rows = np.arange(used[0], used[-1] + 1)
        edges = np.append(_ENTROPY_EDGES, max(self._largest, float(_ENTROPY_EDGES[-1])))[rows[0] : rows[-1] + 2]
        labels = [f"{low:g} - {high:.3g}" for low, high in zip(edges[:-1], edges[1:], strict=True)]
        note = f"{self._unknown} tokens without an entropy are left out" if self._unknown else ""
        return self._cut.chosen(rows).view("entropy", labels, edges, note=note)


class ByTurn:
    """Tokens around the boundaries of turns, and by number of the turn.

    A turn is a run of trained tokens; a boundary is the first token of any but a response's first turn (place 0, its
    place before the boundary being the last token of the turn before, whatever untrained tokens lie between). A token
    of a turn of few tokens stands at a place after one boundary and before the next, and counts at both.
    """

    def __init__(self) -> None:
        self._cut = Cut(2 * _REACH + 1 + _TURNS)

    def add(self, tokens: Trained) -> None:
        follows = np.append(False, np.diff(tokens.places) == 1)
        follows[tokens.starts[:-1]] = False
        begins = np.flatnonzero(~follows)  # of each turn, among the trained tokens
        if not len(begins):
            return
        ends = np.append(begins[1:], len(tokens))
        turn = np.cumsum(~follows) - 1
        first = turn[tokens.starts[:-1]]  # each response's first turn
        number = np.arange(len(begins)) - np.repeat(first, np.diff(np.append(first, len(begins))))
        last = np.append(number[1:] == 0, True)
        after = np.arange(len(tokens)) - begins[turn]
        before = np.arange(len(tokens)) - ends[turn]
        near = np.flatnonzero((after <= _REACH) & (number[turn] > 0))
        self._cut.add(after[near] + _REACH, tokens, near)
        near = np.flatnonzero((before >= -_REACH) & ~last[turn])
        self._cut.add(before[near] + _REACH, tokens, near)
        self._cut.add(2 * _REACH + 1 + np.minimum(number[turn], _TURNS - 1), tokens)

    def view(self) -> View | None:
        count = self._cut.count
        if count[_REACH] == 0:
            return None
        turns = [f"turn {number + 1}" for number in range(_TURNS)]
        turns[-1] += " and later"
        places = [f"{place:+d}" if place else "0" for place in range(-_REACH, _REACH + 1)]
        rows = np.flatnonzero((np.arange(len(count)) < 2 * _REACH + 1) | (count > 0))
        labels = [(places + turns)[row] for row in rows]
        note = "0 is the first token of a turn that follows untrained tokens, -1 the last trained token before them"
        return self._cut.chosen(rows).view("turn", labels, note=note)
