"""Total drift split into train-inference mismatch and staleness.

A token of age a was sampled from mu_v, version v on the sampler, and is scored by pi_P, version P = v + a on the
trainer. Its log-ratio is a sum, log pi_P - log mu_v = (log pi_v - log mu_v) + (log pi_P - log pi_v): mismatch
and staleness. At age 0 the second part is 0. Since k3 is unbiased for KL(mu_v || pi_P) on tokens of mu_v, and the KL is
the mean of minus that sum, the mean of k3 splits into the same two parts without a cross term. The variance has one:
there the split assumes that the two parts are uncorrelated.

Mismatch depends strongly on the behavior probability, whose distribution may differ between tokens of age 0 and others.
Therefore the mismatch of older tokens is estimated by tokens of age 0 in the same bin of behavior probability. Most
tokens are nearly certain and mismatch grows with -log p, so that bins have equal ratios in -log p, four per factor of
two: bins of a third of a decade in p would count a fifth of the mismatch of rarer old tokens as staleness.
"""

from __future__ import annotations

import numpy as np

from trimtab.diagnosis.measure.size import CLUSTERS
from trimtab.diagnosis.measure.trained_tokens import TrainedTokens, octave
from trimtab.diagnosis.records import DriftSplit
from trimtab.intervals import FEWEST_CLUSTERS, Interval, resampled

_FEWEST = 100
"""Fewest tokens of age 0 in a bin of behavior probability; bins with fewer are merged with their neighbor."""
_NEAR = 5  # bins next to each other in which tokens of age 0 are sought before a bin counts as having none
_MAX_UNMATCHED = 0.05
"""Largest share of k3 in bins without tokens of age 0, which are compared with the nearest bins that have some."""
_SMALLEST, _LARGEST = -10, 4
"""Range of -log p, as powers of two."""
_COARSER = 3  # bits of `octave` given up: 4 bins a factor of two instead of 32
_BINS = ((_LARGEST - _SMALLEST) << (5 - _COARSER)) + 1
_NAMES = ("mismatch", "staleness", "variance_mismatch", "variance_staleness")


class DriftSums:
    """Sums per cluster, age (0 or older) and bin of behavior probability: tokens, k3, log-ratio, its square."""

    def __init__(self) -> None:
        self._sums = np.zeros((4, CLUSTERS, 2, _BINS))
        self._unavailable_reason = "there is no trained token"
        self._newer = 0
        self._youngest = np.iinfo(np.int64).max

    def add(self, tokens: TrainedTokens) -> None:
        if tokens.table.age is None:
            absent = "policy_version" if tokens.table.version is None else "proximal_version"
            self._unavailable_reason = f"the data has no {absent}, so which tokens are of age 0 is unknown"
            return
        if not len(tokens):
            return
        age = tokens.at_tokens(tokens.table.age)
        self._newer += int((age < 0).sum())
        self._youngest = min(self._youngest, int(age.min()))
        bucket = (tokens.cluster % np.uint64(CLUSTERS)).astype(np.int64)[tokens.rows]
        index = (2 * bucket + (age != 0)) * _BINS + _surprise(tokens.behavior)
        for at, values in enumerate((None, tokens.k3, tokens.log, np.square(tokens.log))):
            sums = np.bincount(index, weights=values, minlength=self._sums[0].size)
            self._sums[at] += sums.reshape(self._sums[0].shape)

    def split(self, seed: int) -> DriftSplit:
        count = self._sums[0].sum(axis=0)  # (2, bins)
        if not count.sum():
            return DriftSplit(False, self._unavailable_reason)
        if self._newer:
            return DriftSplit(False, f"{self._newer} tokens are newer than proximal_version: the versions do not fit")
        if count[0].sum() < _FEWEST:
            fresh = f"{int(count[0].sum())} tokens are of age 0 (the youngest is {self._youngest} updates old)"
            return DriftSplit(False, f"{fresh}; {_FEWEST} are needed")
        lonely = np.convolve(count[0], np.ones(_NEAR), "same") < _FEWEST
        older, k3 = self._sums[1, :, 1].sum(axis=0), self._sums[1].sum()
        if older[lonely].sum() > _MAX_UNMATCHED * k3:
            share = f"{older[lonely].sum() / k3:.0%} of k3"
            return DriftSplit(
                False, f"{share} lies at behavior probabilities with fewer than {_FEWEST} tokens of age 0"
            )
        starts = _starts(count[0])
        merged = np.add.reduceat(self._sums, starts, axis=-1)
        clusters = merged[:, merged[0].sum(axis=(1, 2)) > 0]
        value = _parts(clusters.sum(axis=1)[:, None])[:, 0]
        share = count[0].sum() / count.sum()
        why = (
            f"{share:.1%} of the tokens are of age 0; their k3 in {len(starts)} bins of behavior probability stands "
            f"for the mismatch of all tokens"
        )
        if share == 1:
            why = "every token is of age 0, so all drift is mismatch"
        return DriftSplit(True, why, float(value[0]), float(value[1]), _intervals(clusters, value, seed))


def _surprise(logp: np.ndarray) -> np.ndarray:
    """Returns the bin of each -log p, certain tokens last."""
    index = octave(np.maximum(-logp, 0.0).astype(np.float32), _SMALLEST) >> _COARSER
    return _BINS - 1 - np.clip(index + 1, 0, _BINS - 1).astype(np.int64)


def _starts(fresh: np.ndarray) -> np.ndarray:
    """Returns the first bin of each group of bins with `_FEWEST` tokens of age 0, formed from likely tokens down."""
    starts, have = [], 0.0
    for bin_ in range(len(fresh))[::-1]:
        have += fresh[bin_]
        if have >= _FEWEST:
            starts.append(bin_)
            have = 0.0
    starts[-1] = 0
    return np.array(starts[::-1])


def _parts(sums: np.ndarray) -> np.ndarray:
    """`_NAMES` (4, any) from sums (4, any, 2, bins)."""
    whole, fresh = sums.sum(axis=2), sums[:, :, 0]
    tokens = whole[0].sum(axis=-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        # The mean over all tokens if each had the mean of age 0 in its bin. The factor is exactly 1 where every token
        # is of age 0, so that staleness is then exactly 0.
        matched = np.where(whole[0] > 0, fresh * (whole[0] / fresh[0]), 0.0).sum(axis=-1) / tokens
        total = whole.sum(axis=-1) / tokens
    _, k3_fresh, log_fresh, square_fresh = matched
    _, k3, log, square = total
    variance, variance_fresh = square - np.square(log), square_fresh - np.square(log_fresh)
    return np.stack([k3_fresh, k3 - k3_fresh, variance_fresh, variance - variance_fresh])


def _intervals(clusters: np.ndarray, value: np.ndarray, seed: int) -> dict[str, Interval]:
    """Returns percentile intervals over clusters; none with too few."""
    fields, count = clusters.shape[0], clusters.shape[1]
    if count < FEWEST_CLUSTERS:
        return {}
    draws = resampled(count, seed) @ np.moveaxis(clusters, 1, 0).reshape(count, -1)
    drawn = _parts(np.moveaxis(draws.reshape(-1, fields, *clusters.shape[2:]), 0, 1))
    # A resample without a token of age 0 in some bin is NaN and skipped.
    low, high = np.nanquantile(drawn, (0.025, 0.975), axis=1)
    return dict(zip(_NAMES, map(Interval, value.tolist(), low.tolist(), high.tolist()), strict=True))
