"""Views whose bins depend on single tokens: behavior probability, position, entropy, turn."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from trimtab.diagnosis.measure.bins import LOG_RATIO_BINS, PROBABILITY_BINS, PROBABILITY_EDGES, quantiles
from trimtab.diagnosis.measure.trained_tokens import TrainedTokens
from trimtab.diagnosis.records import View
from trimtab.diagnosis.tokens import DECILES

ENVELOPE = (0.02, 0.50, 0.98)


class BinnedSums:
    """A histogram of the log-ratio and the sums behind the means of each bin."""

    def __init__(self, bins: int) -> None:
        self.histogram = np.zeros((bins, LOG_RATIO_BINS), dtype=np.int64)
        self.sums = np.zeros((bins, 4))  # of ratio - 1, log-ratio, k3, |log-ratio|

    def add(self, index: np.ndarray, tokens: TrainedTokens, where: np.ndarray | None = None) -> None:
        """Adds tokens to the bins `index`; with `where` (indices of tokens) only those, `index` being theirs."""
        bins, width = self.histogram.shape
        chosen = slice(None) if where is None else where
        flat = index * width + tokens.log_ratio_bin[chosen]
        self.histogram += np.bincount(flat, minlength=bins * width).reshape(bins, width)
        for column, values in enumerate((tokens.excess, tokens.log, tokens.k3, tokens.size)):
            self.sums[:, column] += np.bincount(index, weights=values[chosen], minlength=bins)

    @property
    def count(self) -> np.ndarray:
        return self.histogram.sum(axis=1)

    def merged(self, starts: np.ndarray) -> BinnedSums:
        """Merges neighboring bins; `starts` are the first ones of the new bins."""
        merged = BinnedSums(0)
        merged.histogram = np.add.reduceat(self.histogram, starts, axis=0)
        merged.sums = np.add.reduceat(self.sums, starts, axis=0)
        return merged

    def chosen(self, rows: np.ndarray) -> BinnedSums:
        """Selects bins, in this order."""
        chosen = BinnedSums(0)
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
        """Returns the bins as a view, NaN in empty ones."""
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
    """Builds a view from counts (bins,), sums (bins, 4) as in `BinnedSums` and three percentiles."""
    with np.errstate(invalid="ignore"):
        excess, log, k3, size = (sums / count[:, None]).T
    low, median, high = envelope
    return View(
        name, tuple(labels), count, 1.0 + excess, log, k3, size, low, median, high, edges, dict(columns or {}), note
    )


_ENTROPY_EDGES = np.array([0.0, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_REACH = 3  # tokens either side of a turn's boundary
_TURNS = 8
_SINCE = np.array([0, 1, 2, 3, 4, 8, 16, 32, 64, 128])  # first distance of each bin, in tokens


class Part(Protocol):
    """Accumulates trained tokens table by table; `view` is None when the data lacks what it needs."""

    def add(self, tokens: TrainedTokens) -> None: ...

    def view(self) -> View | None: ...


class ProbabilityView:
    def __init__(self) -> None:
        self._bins = BinnedSums(PROBABILITY_BINS)

    def add(self, tokens: TrainedTokens) -> None:
        self._bins.add(tokens.probability_bin, tokens)

    def view(self) -> View:
        ends = [f"{edge:.2g}" for edge in PROBABILITY_EDGES]
        labels = [f"{low} - {high}" for low, high in itertools.pairwise(ends)]
        labels[0] = f"below {ends[1]}"
        return self._bins.view("probability", labels, PROBABILITY_EDGES)


class PositionView:
    """The view by tenth of the response, untrained tokens included."""

    def __init__(self) -> None:
        self._bins = BinnedSums(DECILES)

    def add(self, tokens: TrainedTokens) -> None:
        self._bins.add(tokens.at_tokens(tokens.table.decile), tokens)

    def view(self) -> View:
        labels = [f"{10 * tenth}-{10 * tenth + 10}%" for tenth in range(DECILES)]
        return self._bins.view("position", labels, np.linspace(0.0, 1.0, DECILES + 1))


class EntropyView:
    """The view by entropy of the sampler, in nats. Tokens of unknown entropy are omitted and counted."""

    def __init__(self) -> None:
        self._bins = BinnedSums(len(_ENTROPY_EDGES))
        self._largest = 0.0
        self._unknown = 0

    def add(self, tokens: TrainedTokens) -> None:
        if tokens.table.entropy is None:
            return
        entropy = tokens.at_tokens(tokens.table.entropy)
        known = np.flatnonzero(np.isfinite(entropy))
        self._unknown += len(entropy) - len(known)
        if not len(known):
            return
        entropy = np.maximum(entropy[known], 0.0)
        self._largest = max(self._largest, float(entropy.max()))
        self._bins.add(np.searchsorted(_ENTROPY_EDGES, entropy, side="right") - 1, tokens, known)

    def view(self) -> View | None:
        used = np.flatnonzero(self._bins.count)
        if not len(used):
            return None
        rows = np.arange(used[0], used[-1] + 1)
        edges = np.append(_ENTROPY_EDGES, max(self._largest, float(_ENTROPY_EDGES[-1])))[rows[0] : rows[-1] + 2]
        labels = [f"{low:g} - {high:.3g}" for low, high in itertools.pairwise(edges)]
        note = f"{self._unknown} tokens without an entropy are left out" if self._unknown else ""
        return self._bins.chosen(rows).view("entropy", labels, edges, note=note)


class TurnView:
    """The view by position around the boundaries of turns.

    A turn is what the data says, or else a run of trained tokens; a boundary is the first token of any turn but the
    first of a response. That token has position 0 and the last trained token before it -1, regardless of the untrained
    tokens between them. A token near two boundaries counts at the earlier one.
    """

    def __init__(self) -> None:
        self._bins = BinnedSums(2 * _REACH + 2)

    def add(self, tokens: TrainedTokens) -> None:
        after, before = tokens.turns.after, tokens.turns.before
        index = np.where(before >= -_REACH, before + _REACH, 2 * _REACH + 1)
        self._bins.add(np.where(after <= _REACH, after + _REACH, index), tokens)

    def view(self) -> View | None:
        if self._bins.count[_REACH] == 0:
            return None
        labels = [f"{place:+d}" if place else "0" for place in range(-_REACH, _REACH + 1)]
        note = "0 is the first token of a turn that follows untrained tokens, -1 the last trained token before them"
        return self._bins.view("turn", [*labels, "elsewhere"], note=note)


class AfterObservationView:
    """The view by number of trained tokens since the last observation; absent, like `TurnView`, without one."""

    def __init__(self) -> None:
        self._bins = BinnedSums(len(_SINCE) + 1)

    def add(self, tokens: TrainedTokens) -> None:
        after = tokens.turns.after
        since = np.searchsorted(_SINCE, after, side="right") - 1
        self._bins.add(np.where(after > tokens.lengths[tokens.rows], len(_SINCE), since), tokens)

    def view(self) -> View | None:
        if self._bins.count[0] == 0:
            return None
        lasts = [*(_SINCE[1:] - 1).tolist(), None]
        labels = [f"{low}" if low == high else f"{low}-{high}" for low, high in zip(_SINCE, lasts, strict=True)]
        labels = [*labels[:-1], f"{_SINCE[-1]} and more", "no observation yet"]
        rows = np.flatnonzero(self._bins.count)
        note = "0 is the first token that follows an observation"
        return self._bins.chosen(rows).view("observation", [labels[row] for row in rows], note=note)


class TurnNumberView:
    """The view by number of the turn; absent, like `TurnView`, where no response has two."""

    def __init__(self) -> None:
        self._bins = BinnedSums(_TURNS)

    def add(self, tokens: TrainedTokens) -> None:
        self._bins.add(np.minimum(tokens.turns.number, _TURNS - 1), tokens)

    def view(self) -> View | None:
        rows = np.flatnonzero(self._bins.count)
        if len(rows) < 2:
            return None
        labels = [f"{row + 1}" if row < _TURNS - 1 else f"{_TURNS} and later" for row in rows]
        return self._bins.chosen(rows).view("turn-number", labels)
