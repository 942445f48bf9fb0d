"""Fixed bins of log-ratio, length and behavior probability.

Positive numbers fall into 32 bins a factor of two, read off the bits of a float32 (exponent and five digits of the
mantissa): no logarithm, and the width of a bin is at most 1/32 of the number.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trimtab.diagnosis.token_statistics import DECADES, PER_DECADE

_RATE = 5  # bits of the mantissa that tell bins apart
_SHIFT = 23 - _RATE
_BIAS = 127

_SMALLEST, _LARGEST = -30, 5
_SIDE = (_LARGEST - _SMALLEST) << _RATE
LOG_RATIO_BINS = 2 * _SIDE + 1
"""Bins of the log-ratio: magnitudes from 2^-30 (1e-9) to 32, both signs; less is 0, more is in the end bins."""

PROBABILITY_BINS = PER_DECADE * DECADES
PROBABILITY_EDGES = 10.0 ** (np.arange(-PROBABILITY_BINS, 1) / PER_DECADE)
"""Three bins in each factor of ten, likely tokens last; the first takes everything below 1e-5 as well."""


def octave(values: np.ndarray, lowest: int) -> np.ndarray:
    """Bin of each value > 0 (float32), 0 at 2^lowest; below 0 for less. int32."""
    return (values.view(np.int32) >> _SHIFT) - ((_BIAS + lowest) << _RATE)


def octave_edges(lowest: int, count: int) -> np.ndarray:
    """Lower ends (count + 1,) of the bins of `octave`, the last one an upper end."""
    index = np.arange(count + 1)
    return np.ldexp(1.0 + (index % (1 << _RATE)) / (1 << _RATE), lowest + (index >> _RATE))


def log_ratio_bin(log_ratio: np.ndarray) -> np.ndarray:
    """Bin of each log-ratio in `[0, LOG_RATIO_BINS)`."""
    narrow = log_ratio.astype(np.float32)
    magnitude = np.clip(octave(np.abs(narrow), _SMALLEST) + 1, 0, _SIDE)
    return (_SIDE + np.where(narrow < 0, -magnitude, magnitude)).astype(np.int64)


def probability_bin(logp: np.ndarray) -> np.ndarray:
    """Bin of each probability, given as its log; the upper end of a bin belongs to it, as in
    `token_statistics.envelope`."""
    depth = -np.minimum(logp, 0.0) / np.log(10) * PER_DECADE
    return PROBABILITY_BINS - 1 - np.minimum(depth, PROBABILITY_BINS - 1).astype(np.int64)


def quantiles(histogram: np.ndarray, levels: Sequence[float]) -> np.ndarray:
    """Quantiles (rows, levels) of log-ratios counted in a histogram (rows, LOG_RATIO_BINS); NaN in an empty row.

    Linear between order statistics as in `np.quantile`; those that share a bin lie evenly in it.
    """
    upto = histogram.cumsum(axis=1)
    place = np.asarray(levels) * np.maximum(upto[:, -1:] - 1, 0)
    low, high = (_order_statistics(histogram, upto, rank) for rank in (np.floor(place), np.ceil(place)))
    return np.where(upto[:, -1:] > 0, low + (place - np.floor(place)) * (high - low), np.nan)


def _order_statistics(histogram: np.ndarray, upto: np.ndarray, rank: np.ndarray) -> np.ndarray:
    rows = np.arange(len(histogram))[:, None]
    places = [np.searchsorted(line, wanted, side="right") for line, wanted in zip(upto, rank, strict=True)]
    index = np.minimum(np.array(places, dtype=np.int64).reshape(rank.shape), LOG_RATIO_BINS - 1)
    count = np.maximum(histogram[rows, index], 1)
    within = (rank - (upto[rows, index] - histogram[rows, index]) + 0.5) / count
    return np.where(index == _SIDE, 0.0, _EDGES[index] + within * (_EDGES[index + 1] - _EDGES[index]))


def _log_ratio_edges() -> np.ndarray:
    positive = octave_edges(_SMALLEST, _SIDE)
    return np.concatenate([-positive[::-1], positive])


_EDGES = _log_ratio_edges()
