"""Trained tokens of a table, fixed bins for them, and sums over groups of them: the basis of all measurements.

Positive numbers have 32 bins per factor of two, computed without a logarithm from the bits of a float32 (the exponent
and five bits of the mantissa). The width of a bin is at most 1/32 of the number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np

from trimtab.corrections.ratios import LOG_RATIO_BOUND
from trimtab.corrections.statistics import RatioStatistics
from trimtab.diagnosis.records import View
from trimtab.diagnosis.tokens import TokenTable, excess, k3

FEWEST_IN_GROUP = 20  # fewest tokens of a bin for which its 2nd and 98th percentile are computed
PER_DECADE, DECADES = 3, 5

_RATE = 5  # bits of the mantissa that tell bins apart
_SHIFT = 23 - _RATE
_BIAS = 127

_SMALLEST, _LARGEST = -30, 5
_SIDE = (_LARGEST - _SMALLEST) << _RATE
LOG_RATIO_BINS = 2 * _SIDE + 1
"""Number of bins of the log-ratio: both signs, magnitudes from 2^-30 (1e-9) to 32; less is 0, more in the end bins."""

PROBABILITY_BINS = PER_DECADE * DECADES
PROBABILITY_EDGES = 10.0 ** (np.arange(-PROBABILITY_BINS, 1) / PER_DECADE)
"""Three bins per factor of ten, ascending; the first one includes everything below 1e-5."""


def octave(values: np.ndarray, lowest: int) -> np.ndarray:
    """Returns the bin of each value > 0 (float32) as int32: 0 at 2^lowest, negative below."""
    return (values.view(np.int32) >> _SHIFT) - ((_BIAS + lowest) << _RATE)


def log_ratio_bin(log_ratio: np.ndarray) -> np.ndarray:
    """Returns the bin of each log-ratio, in `[0, LOG_RATIO_BINS)`."""
    narrow = log_ratio.astype(np.float32)
    magnitude = np.clip(octave(np.abs(narrow), _SMALLEST) + 1, 0, _SIDE)
    return (_SIDE + np.where(narrow < 0, -magnitude, magnitude)).astype(np.int64)


def probability_bin(logp: np.ndarray) -> np.ndarray:
    """Returns the bin of each log-prob. A bin includes its upper edge."""
    depth = -np.minimum(logp, 0.0) / np.log(10) * PER_DECADE
    return PROBABILITY_BINS - 1 - np.minimum(depth, PROBABILITY_BINS - 1).astype(np.int64)


def plane(x: np.ndarray, y: np.ndarray, bins: int) -> np.ndarray:
    """Returns counts (bins, bins) of points of the unit square, rows along y; 1 is in the last bin."""
    column, row = (np.clip(values * bins, 0, bins - 1).astype(np.int64) for values in (x, y))
    return np.bincount(row * bins + column, minlength=bins * bins).reshape(bins, bins)


def quantiles(histogram: np.ndarray, levels: Sequence[float]) -> np.ndarray:
    """Returns quantiles (rows, levels) of log-ratios from a histogram (rows, LOG_RATIO_BINS); NaN in an empty row.

    Linear between order statistics as in `np.quantile`; values within a bin are taken as evenly spaced.
    """
    cumulative = histogram.cumsum(axis=1)
    position = np.asarray(levels) * np.maximum(cumulative[:, -1:] - 1, 0)
    low, high = (_order_statistics(histogram, cumulative, rank) for rank in (np.floor(position), np.ceil(position)))
    return np.where(cumulative[:, -1:] > 0, low + (position - np.floor(position)) * (high - low), np.nan)


def _order_statistics(histogram: np.ndarray, cumulative: np.ndarray, rank: np.ndarray) -> np.ndarray:
    rows = np.arange(len(histogram))[:, None]
    bins = [np.searchsorted(line, ranks, side="right") for line, ranks in zip(cumulative, rank, strict=True)]
    index = np.minimum(np.array(bins, dtype=np.int64).reshape(rank.shape), LOG_RATIO_BINS - 1)
    count = np.maximum(histogram[rows, index], 1)
    within = (rank - (cumulative[rows, index] - histogram[rows, index]) + 0.5) / count
    return np.where(index == _SIDE, 0.0, _EDGES[index] + within * (_EDGES[index + 1] - _EDGES[index]))


_INDEX = np.arange(_SIDE + 1)
_POSITIVE_EDGES = np.ldexp(1.0 + (_INDEX % (1 << _RATE)) / (1 << _RATE), _SMALLEST + (_INDEX >> _RATE))
_EDGES = np.concatenate([-_POSITIVE_EDGES[::-1], _POSITIVE_EDGES])


_SEQUENCE_BOUND = 300.0  # exponent bound of sequence sums: exp(2 * 300) still fits float64
_FAR = 1 << 40  # position relative to a turn's boundary that does not exist


@dataclass(frozen=True, eq=False)
class TrainedTokens:
    """The trained tokens of a table in flat arrays (tokens,) float64, and the responses that have any."""

    table: TokenTable
    places: np.ndarray  # index of each token in the table
    responses: np.ndarray  # indices of the table's responses with a trained token
    starts: np.ndarray  # (responses + 1,): where each of these responses begins among the trained tokens
    behavior: np.ndarray
    trainer: np.ndarray
    log: np.ndarray  # the log-ratio
    first: int  # index of the table's first response in the whole stream

    @classmethod
    def of(cls, table: TokenTable, first: int) -> TrainedTokens:
        """Selects trained tokens. first: number of earlier responses. Raises `ValueError` for a non-finite log-prob."""
        places = np.flatnonzero(table.mask)
        upto = np.append(0, np.cumsum(table.mask))[table.starts]
        responses = np.flatnonzero(np.diff(upto))
        # Log-probs are stored in float32; their difference in float64 is exact.
        behavior, trainer = (values[places].astype(np.float64) for values in (table.behavior, table.trainer))
        log = trainer - behavior
        if not np.isfinite(log).all():
            raise ValueError("a trained token has a log-prob that is not finite: readers leave such tokens out")
        starts = np.append(upto[responses], upto[-1])
        return cls(table, places, responses, starts, behavior, trainer, log, first)

    def __len__(self) -> int:
        return len(self.log)

    @cached_property
    def lengths(self) -> np.ndarray:
        """The number of trained tokens of each response (responses,) int64."""
        return np.diff(self.starts)

    @cached_property
    def rows(self) -> np.ndarray:
        """The position in `responses` of each token's response."""
        return np.repeat(np.arange(len(self.responses)), self.lengths)

    @cached_property
    def excess(self) -> np.ndarray:
        return excess(self.log)

    @cached_property
    def k3(self) -> np.ndarray:
        return k3(self.log)

    @cached_property
    def size(self) -> np.ndarray:
        return np.abs(self.log)

    @cached_property
    def log_ratio_bin(self) -> np.ndarray:
        return log_ratio_bin(self.log)

    @cached_property
    def q(self) -> np.ndarray:
        """Probability of the token under the sampler; above 1, and bounded, for a log-prob above 0 (a finding)."""
        return np.exp(np.minimum(self.behavior, LOG_RATIO_BOUND))

    @cached_property
    def p(self) -> np.ndarray:
        """Probability of the token under the trainer, as `q`."""
        return np.exp(np.minimum(self.trainer, LOG_RATIO_BOUND))

    @cached_property
    def sums(self) -> np.ndarray:
        """Sums over each response (responses, FIELDS); fields of sequences are as in `corrections.statistics`."""
        log = self.over(self.log)
        product = np.exp(np.clip(log, -_SEQUENCE_BOUND, _SEQUENCE_BOUND))
        columns = {
            "tokens": self.lengths,
            "log": log,
            "log_square": self.over(np.square(self.log)),
            "log_abs": self.over(self.size),
            "excess": self.over(self.excess),
            "excess_square": self.over(np.square(self.excess)),
            "k3": self.over(self.k3),
            "p": self.over(self.p),
            "q": self.over(self.q),
            "p_square": self.over(np.square(self.p)),
            "q_square": self.over(np.square(self.q)),
            "p_q": self.over(self.p * self.q),
            "sequences": np.ones(len(self.responses)),
            "product": product,
            "product_square": np.square(product),
            "ppl_ratio": np.exp(np.minimum(-log / self.lengths, _SEQUENCE_BOUND)),
            "ppl_train": np.exp(np.minimum(-self.over(self.trainer) / self.lengths, _SEQUENCE_BOUND)),
        }
        return np.stack([columns[name] for name in FIELDS], axis=1)

    @cached_property
    def largest(self) -> np.ndarray:
        """(responses, 3): the largest log-ratio and -log-ratio of a token, and the log-ratio of the whole response."""
        of_tokens = np.maximum.reduceat(np.stack([self.log, -self.log]), self.starts[:-1], axis=1)
        return np.stack([*of_tokens, self.sums[:, FIELDS.index("log")]], axis=1)

    def over(self, values: np.ndarray) -> np.ndarray:
        """Returns the sum over each response (responses,)."""
        return np.add.reduceat(values, self.starts[:-1])

    def per_response(self, column: np.ndarray) -> np.ndarray:
        """Returns a per-response column of the table at the responses with a trained token."""
        return column[self.responses]

    def at_tokens(self, column: np.ndarray) -> np.ndarray:
        """Returns a per-token column of the table at the trained tokens."""
        return column[self.places]

    @cached_property
    def around_turns(self) -> tuple[np.ndarray, np.ndarray]:
        """The positions relative to the start of the token's turn, and of the next turn, both (tokens,) int64.

        The first is very large in a first turn. The second is -1 for the last token of a turn, and very negative in a
        last turn.
        """
        number = self.at_tokens(self.table.turn_number)
        begin = np.append(True, np.diff(number) != 0)
        begin[self.starts[:-1]] = True
        begins, turn = np.flatnonzero(begin), np.cumsum(begin) - 1
        behind = np.where(number[begins] > 0, begins, -_FAR)
        is_followed = ~np.isin(np.append(begins[1:], self.starts[-1]), self.starts)
        ahead = np.where(is_followed, np.append(begins[1:], 0), _FAR)
        place = np.arange(len(self))
        return place - behind[turn], place - ahead[turn]

    @cached_property
    def cluster(self) -> np.ndarray:
        """The bootstrap cluster of each response, uint64: a hash of its group (and step), or of its index."""
        table = self.table
        if table.group is None:
            return hash_index((self.first + self.responses).astype(np.uint64))
        group = self.per_response(table.group).astype(np.uint64)
        if table.step is not None:
            group = hash_index(group) ^ self.per_response(table.step).astype(np.uint64)
        return hash_index(group)


_OTHERS = ("log_min", "log_max", "product_log_max", "histogram")
FIELDS = tuple(item.name for item in fields(RatioStatistics) if item.name not in _OTHERS)
"""The summed fields of `RatioStatistics`, in the order of `TrainedTokens.sums`."""


def hash_index(numbers: np.ndarray) -> np.ndarray:
    """Returns a uniform, fixed uint64 hash of each number (the SplitMix64 finalizer; Steele et al., OOPSLA 2014)."""
    mixed = numbers + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


ENVELOPE = (0.02, 0.50, 0.98)


class Groups:
    """Sums (groups, 5) of 1, ratio - 1, log-ratio, k3 and |log-ratio|, and a histogram of the log-ratio.

    bins: number of bins of the histogram; 0 for no histogram, if there are too many groups.
    """

    def __init__(self, groups: int, bins: int = LOG_RATIO_BINS) -> None:
        self.sums = np.zeros((groups, 5))
        self.histogram = np.zeros((groups, bins), dtype=np.int64)

    def add(self, group: np.ndarray, tokens: TrainedTokens) -> None:
        """Adds tokens to their groups (tokens,)."""
        groups, bins = self.histogram.shape
        weights = (None, tokens.excess, tokens.log, tokens.k3, tokens.size)
        self.sums += np.column_stack([np.bincount(group, values, groups) for values in weights])
        if bins:
            cells = np.bincount(group * bins + tokens.log_ratio_bin, minlength=groups * bins)
            self.histogram += cells.reshape(groups, bins)

    @property
    def count(self) -> np.ndarray:
        return self.sums[:, 0].astype(np.int64)

    def view(
        self, name: str, labels: Sequence[str], rows: np.ndarray, envelope: np.ndarray | None = None, **others: Any
    ) -> View:
        """Returns the groups `rows` as a view; NaN in empty ones.

        envelope: the percentiles (groups, 3); by default those of the histogram. others: edges, columns, note.
        """
        envelope = quantiles(self.histogram[rows], ENVELOPE) if envelope is None else envelope
        with np.errstate(invalid="ignore"):
            excess, log, k3, size = (self.sums[rows, 1:] / self.sums[rows, :1]).T
        return View(name, tuple(labels), self.count[rows], 1.0 + excess, log, k3, size, *envelope.T, **others)


class StepSums:
    """Sums, maxima and a histogram of log-ratios by step, in bounded memory.

    With more than `most` rows, neighboring steps are merged into blocks of 2, 4, 8, ... steps: the smallest that fit.
    The blocks depend only on the steps, not on their order.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.width = 1
        self._rows: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def add(
        self, steps: np.ndarray, sums: np.ndarray, largest: np.ndarray, flat: tuple[np.ndarray, np.ndarray]
    ) -> None:
        """Adds rows: steps (n,), which may repeat; sums (n, fields); largest (n, any).

        flat: the row in `steps` and the log-ratio bin of each token, both (tokens,).
        """
        unique, place = np.unique(steps, return_inverse=True)
        count = len(unique)
        cells = place[flat[0]] * LOG_RATIO_BINS + flat[1]
        histogram = np.bincount(cells, minlength=count * LOG_RATIO_BINS).reshape(count, LOG_RATIO_BINS)
        order = np.argsort(place, kind="stable")
        starts = np.searchsorted(place[order], np.arange(count))
        total, most = np.add.reduceat(sums[order], starts), np.maximum.reduceat(largest[order], starts)
        for row, step in enumerate(unique.tolist()):
            # A copy: a view would keep the histograms of the whole table in memory.
            self._merge(step // self.width, (total[row], most[row], histogram[row].astype(np.uint32)))
        while len(self._rows) > self._most:
            rows, self._rows, self.width = self._rows, {}, 2 * self.width
            for block, row in rows.items():
                self._merge(block // 2, row)

    def rows(self) -> Iterator[tuple[int, tuple[np.ndarray, np.ndarray, np.ndarray]]]:
        """Yields blocks of steps in order, each with its sums, maxima and histogram."""
        yield from sorted(self._rows.items(), key=lambda item: item[0])

    def _merge(self, block: int, row: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
        if block in self._rows:
            sums, largest, histogram = self._rows[block]
            row = (sums + row[0], np.maximum(largest, row[1]), histogram + row[2])
        self._rows[block] = row


def explained(values: np.ndarray, group: np.ndarray, least: int = 1) -> float:
    """Returns the share of the variance that groups of at least `least` values explain beyond chance.

    Chance is what random groups explain, plus three standard deviations. 0 for a single group.
    """
    _, group, count = np.unique(group, return_inverse=True, return_counts=True)
    groups = int((count >= least).sum())
    if groups < 2:
        return 0.0
    used = (count >= least)[group]
    values, group = values[used], group[used]
    values = values - values.mean()
    means = np.bincount(group, values, len(count)) / count
    between = float((count * np.square(means))[count >= least].sum()) / max(float(values @ values), 1e-300)
    return between - (groups - 1 + 3 * float(np.sqrt(2 * (groups - 1)))) / len(values)
