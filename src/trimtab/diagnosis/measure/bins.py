"""Fixed bins of log-ratio, length and behavior probability.

Positive numbers have 32 bins per factor of two, computed without a logarithm from the bits of a float32 (the exponent
and five bits of the mantissa). The width of a bin is at most 1/32 of the number.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

FEWEST = 20
"""Fewest tokens of a bin for which its 2nd and 98th percentile are computed."""
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


def octave_edges(lowest: int, count: int) -> np.ndarray:
    """Returns the edges (count + 1,) of the bins of `octave`."""
    index = np.arange(count + 1)
    return np.ldexp(1.0 + (index % (1 << _RATE)) / (1 << _RATE), lowest + (index >> _RATE))


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


_POSITIVE_EDGES = octave_edges(_SMALLEST, _SIDE)
_EDGES = np.concatenate([-_POSITIVE_EDGES[::-1], _POSITIVE_EDGES])
