"""Views whose bins depend on single tokens: behavior probability, position, entropy, turn."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from trimtab.diagnosis.measure.bins import LOG_RATIO_BINS, PROBABILITY_BINS, PROBABILITY_EDGES, quantiles
from trimtab.diagnosis.measure.trained_tokens import Trained
from trimtab.diagnosis.records import View
from trimtab.diagnosis.token_statistics import DECILES, deciles

ENVELOPE = (0.02, 0.50, 0.98)


class Cut:
    """Trained tokens cut into bins: per bin a histogram of the log-ratio and the sums that means are made of."""

    def __init__(self, bins: int) -> None:
        self.histogram = np.zeros((bins, LOG_RATIO_BINS), dtype=np.int64)
        self.sums = np.zeros((bins, 4))  # of ratio - 1, log-ratio, k3, |log-ratio|

    def add(self, index: np.ndarray, tokens: Trained, where: np.ndarray | None = None) -> None:
        """Count tokens in the bins `index`; with `where` (indices of tokens) only those, `index` being theirs."""
        bins, width = self.histogram.shape
        chosen = slice(None) if where is None else where
        flat = index * width + tokens.log_ratio_bin[chosen]
        self.histogram += np.bincount(flat, minlength=bins * width).reshape(bins, width)
        for column, values in enumerate((tokens.excess, tokens.log, tokens.k3, tokens.size)):
            self.sums[:, column] += np.bincount(index, weights=values[chosen], minlength=bins)

    @property
    def count(self) -> np.ndarray:
        return self.histogram.sum(axis=1)

    def merged(self, starts: np.ndarray) -> Cut:
        """Neighboring bins as one; each of `starts` is the first of its new bin."""
        merged = Cut(0)
        merged.histogram = np.add.reduceat(self.histogram, starts, axis=0)
        merged.sums = np.add.reduceat(self.sums, starts, axis=0)
        return merged

    def chosen(self, rows: np.ndarray) -> Cut:
        """Only these bins, in this order."""
        chosen = Cut(0)
        chosen.histogram, chosen.sums = self.histogram[rows], self.sums[rows]
        return chosen

    def view(
        self,
        name: str,
        labels: Sequence[str],
        edges: np.ndarray | None = None,
        columns: Mapping[str, np.ndarray] | None = None,
        note: str = "",
    ) -> View:
        """The bins as a view; what has no token is NaN."""
        low, median, high = quantiles(self.histogram, ENVELOPE).T
        return view(name, labels, self.count, self.sums, (low, median, high), edges, columns, note)


def view(
    name: str,
    labels: Sequence[str],
    count: np.ndarray,
    sums: np.ndarray,
    envelope: tuple[np.ndarray, np.ndarray, np.ndarray],
    edges: np.ndarray | None = None,
    columns: Mapping[str, np.ndarray] | None = None,
    note: str = "",
) -> View:
    """A view from counts (bins,), sums (bins, 4) as in `Cut` and the envelope's three percentiles."""
    with np.errstate(invalid="ignore"):
        excess, log, k3, size = (sums / count[:, None]).T
    low, median, high = envelope
    return View(
        name, tuple(labels), count, 1.0 + excess, log, k3, size, low, median, high, edges, dict(columns or {}), note
    )


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
        labels = [f"{low} - {high}" for low, high in itertools.pairwise(ends)]
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
        labels = [f"{low:g} - {high:.3g}" for low, high in itertools.pairwise(edges)]
        note = f"{self._unknown} tokens without an entropy are left out" if self._unknown else ""
        return self._cut.chosen(rows).view("entropy", labels, edges, note=note)


class ByTurn:
    """Tokens around the boundaries of turns.

    A turn is a run of trained tokens; a boundary is the first token of any but a response's first turn (place 0, the
    last token of the turn before being at -1, whatever untrained tokens lie between). A token of a short turn that
    stands near two boundaries counts at the one before it.
    """

    def __init__(self) -> None:
        self._cut = Cut(2 * _REACH + 2)

    def add(self, tokens: Trained) -> None:
        after, before = tokens.turns.after, tokens.turns.before
        index = np.where(before >= -_REACH, before + _REACH, 2 * _REACH + 1)
        self._cut.add(np.where(after <= _REACH, after + _REACH, index), tokens)

    def view(self) -> View | None:
        if self._cut.count[_REACH] == 0:
            return None
        labels = [f"{place:+d}" if place else "0" for place in range(-_REACH, _REACH + 1)]
        note = "0 is the first token of a turn that follows untrained tokens, -1 the last trained token before them"
        return self._cut.view("turn", [*labels, "elsewhere"], note=note)


class ByTurnNumber:
    """Tokens by the number of their turn; absent like `ByTurn` where no response has two."""

    def __init__(self) -> None:
        self._cut = Cut(_TURNS)

    def add(self, tokens: Trained) -> None:
        self._cut.add(np.minimum(tokens.turns.number, _TURNS - 1), tokens)

    def view(self) -> View | None:
        rows = np.flatnonzero(self._cut.count)
        if len(rows) < 2:
            return None
        labels = [f"{row + 1}" if row < _TURNS - 1 else f"{_TURNS} and later" for row in rows]
        return self._cut.chosen(rows).view("turn-number", labels)
