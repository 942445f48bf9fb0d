"""Sufficient statistics of log-ratios as sums and histograms, which `+` merges exactly over parts of a batch.

The effective sample size, the Pearson correlation and the quantiles of a batch cannot be computed from the same numbers
of its parts. All values stay tensors: nothing synchronizes with the device. Formulas: docs/reference-objectives.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from trimtab.corrections.divergences import k3
from trimtab.corrections.ratios import LOG_RATIO_BOUND, Ratios, bounded
from trimtab.corrections.reduce import Sequences, select

QUANTILES = (0.01, 0.05, 0.50, 0.95, 0.99)

# Log-ratio histogram: bins of width 1/16384 within |l| < 1/16, the range of geometric bounds, and of width 1/128 up to
# the safety bound, so that a bin's center is within 0.4% of every ratio in it. The end bins count what lies beyond.
_INNER, _INNER_RATE, _OUTER_RATE = 1 / 16, 16384.0, 128.0
_LAST_BIN = _INNER * (_INNER_RATE - _OUTER_RATE) + LOG_RATIO_BOUND * _OUTER_RATE
_ZERO_BIN = int(_LAST_BIN) + 1
_BINS = 2 * _ZERO_BIN + 1

_SEQUENCE_BOUND = 300.0  # exponent bound of sequence statistics: exp(2 * 300) still fits float64

Part = TypeVar("Part", bound="Mergeable")


@dataclass(frozen=True, eq=False)
class Mergeable:
    """A record of tensors that `+` adds field by field; `merge` in a field's metadata replaces the addition."""

    def __add__(self: Part, other: Part) -> Part:
        merged = {
            item.name: item.metadata.get("merge", torch.add)(getattr(self, item.name), getattr(other, item.name))
            for item in fields(self)
        }
        return type(self)(**merged)

    def summary(self) -> dict[str, Tensor]:
        """Returns named scalar tensors, computed from the merged sums."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Mean(Mergeable):
    """A mean, stored as total and count (float64 scalars); NaN when the count is 0."""

    total: Tensor
    count: Tensor

    @classmethod
    def of(cls, values: Tensor, mask: Tensor) -> Mean:
        """Returns the mean over the mask of values (bool or float, already 0 where the mask is False)."""
        return cls(total(values.detach()), total(mask))

    def summary(self) -> dict[str, Tensor]:
        return {"": self.total / self.count}


@dataclass(frozen=True, eq=False)
class Count(Mergeable):
    """A count."""

    total: Tensor

    def summary(self) -> dict[str, Tensor]:
        return {"": self.total}


@dataclass(frozen=True, eq=False)
class Histogram(Mergeable):
    """Counts of log-ratios in fixed bins, from which quantiles of the ratio follow to within 0.4%."""

    counts: Int[Tensor, "bins"]

    @classmethod
    def of(cls, log_ratio: Tensor, mask: Tensor) -> Histogram:
        """Returns the counts of log-ratios where the mask is True; NaN is in the last bin."""
        counts = torch.zeros(_BINS, dtype=torch.int64, device=log_ratio.device)
        return cls(counts.scatter_add(0, _bin(log_ratio).reshape(-1), mask.reshape(-1).to(torch.int64)))

    def quantiles(self, levels: Sequence[float]) -> Float[Tensor, "levels"]:
        """Returns quantiles of the ratio, linear between order statistics as in `torch.quantile`; NaN when empty."""
        cumulative = self.counts.cumsum(0)
        size = cumulative[-1]
        position = torch.tensor(levels, dtype=torch.float64).to(cumulative.device) * (size - 1).clamp(min=0)
        ranks = torch.stack([position.floor(), position.ceil()]).to(torch.int64)
        bins = torch.searchsorted(cumulative, ranks, right=True).clamp(max=_BINS - 1)
        lower, upper = _centers(bins).exp()
        return torch.where(size > 0, torch.lerp(lower, upper, position - position.floor()), torch.nan)

    def transformed(self, function: Callable[[Tensor], Tensor]) -> Histogram:
        """Returns the histogram after a function of every ratio; a ratio of 0 goes to the lowest bin."""
        bins = torch.arange(_BINS, device=self.counts.device)
        index = _bin(function(_centers(bins).exp()).log())
        return Histogram(torch.zeros_like(self.counts).scatter_add(0, index, self.counts))

    @property
    def beyond(self) -> Tensor:
        """Number of log-ratios beyond the safety bound; values within half a bin of the bound may count."""
        return (self.counts[0] + self.counts[-1]).double()

    def summary(self) -> dict[str, Tensor]:
        names = [f"q{round(100 * level):02d}" for level in QUANTILES]
        return dict(zip(names, self.quantiles(QUANTILES).unbind(), strict=True))


def _bin(log_ratio: Tensor) -> Int[Tensor, "*shape"]:
    """Returns the bin index of each log-ratio, as the sum of a steep and a flat clamped line: monotone, no branches."""
    end = LOG_RATIO_BOUND + 1 / _OUTER_RATE
    steep = log_ratio.clamp(-_INNER, _INNER) * (_INNER_RATE - _OUTER_RATE)
    position = steep + log_ratio.clamp(-end, end) * _OUTER_RATE
    return (position + (_ZERO_BIN + 0.5)).nan_to_num(nan=_BINS - 1.0).to(torch.int64)


def _centers(bins: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Returns the log-ratio at the center of each of the bins."""
    position = bins.double() - _ZERO_BIN
    knee = _INNER * _INNER_RATE
    outer = position.sign() * (_INNER + (position.abs() - knee) / _OUTER_RATE)
    return torch.where(position.abs() <= knee, position / _INNER_RATE, outer)


@dataclass(frozen=True, eq=False)
class RatioStatistics(Mergeable):
    """Sums over trained tokens and sequences from which all mismatch metrics of a pair of policies are computed.

    l is the log-ratio numerator/denominator, and rho = exp(l) with l inside the safety bound. p and q are the
    probabilities of the sampled token under the numerator and the denominator. L is the sum of l over a sequence of T
    trained tokens.
    """

    tokens: Tensor
    log: Tensor  # l
    log_square: Tensor
    log_abs: Tensor
    log_min: Tensor = field(metadata={"merge": torch.minimum})
    log_max: Tensor = field(metadata={"merge": torch.maximum})
    excess: Tensor  # rho - 1
    excess_square: Tensor
    k3: Tensor
    p: Tensor
    q: Tensor
    p_square: Tensor
    q_square: Tensor
    p_q: Tensor
    histogram: Int[Tensor, "bins"]
    sequences: Tensor
    product: Tensor  # exp(L)
    product_square: Tensor
    product_log_max: Tensor = field(metadata={"merge": torch.maximum})  # L
    ppl_ratio: Tensor  # exp(-L/T)
    ppl_train: Tensor  # exp(-1/T sum log p)

    @classmethod
    def of(
        cls,
        ratios: Ratios,
        numerator: Float[Tensor, "batch time"],
        denominator: Float[Tensor, "batch time"],
        histogram: Histogram,
    ) -> RatioStatistics:
        """Returns the statistics of the pair of policies from which `ratios` and `histogram` were computed."""
        log, excess, mask = ratios.log, ratios.excess, ratios.sequences.mask
        # Selected before exp, since exp of an untrained -1e4 is denormal and a hundred times slower, and after it,
        # since exp of the 0 at untrained positions is 1.
        log_p, log_q = select(numerator, mask), select(denominator, mask)
        n = total(histogram.counts)
        # Without centers near their means, squares of nearly equal probabilities would lose their digits in float32.
        center_p, center_q = ((log.sum() / n.clamp(min=1).to(log.dtype)).exp() for log in (log_p, log_q))
        p, q = select(log_p.exp() - center_p, mask), select(log_q.exp() - center_q, mask)
        total_p, total_q, center_p, center_q = total(p), total(q), center_p.double(), center_q.double()
        return cls(
            tokens=n,
            log=total(log),
            log_square=_dot(log, log),
            log_abs=total(log.abs()),
            log_min=-_largest(torch.where(mask, -log, -torch.inf)),
            log_max=_largest(torch.where(mask, log, -torch.inf)),
            excess=total(excess),
            excess_square=_dot(excess, excess),
            k3=total(k3(log, excess)),
            p=total_p + n * center_p,
            q=total_q + n * center_q,
            p_square=_dot(p, p) + center_p * (2 * total_p + n * center_p),
            q_square=_dot(q, q) + center_q * (2 * total_q + n * center_q),
            p_q=_dot(p, q) + center_q * total_p + center_p * (total_q + n * center_q),
            histogram=histogram.counts,
            ppl_train=_perplexity(ratios.sequences.mean(log_p), ratios.sequences),
            **_sequence_sums(ratios),
        )

    def summary(self) -> dict[str, Tensor]:
        n, sequences = self.tokens, self.sequences
        ratio = self.excess + n
        ratio_square = self.excess_square + 2.0 * self.excess + n
        covariance = n * self.p_q - self.p * self.q
        spread = (n * self.p_square - self.p.square()).clamp(min=0) * (n * self.q_square - self.q.square()).clamp(min=0)
        histogram = Histogram(self.histogram)
        return {
            "k1": -self.log / n,
            "k2": 0.5 * self.log_square / n,
            "k3": self.k3 / n,
            "chi2_token": (self.excess_square + 2.0 * self.excess) / n,
            "chi2_seq": self.product_square / sequences - 1.0,
            "ess_token": ratio.square() / (n * ratio_square),
            "ess_seq": self.product.square() / (sequences * self.product_square),
            "ratio_mean": ratio / n,
            "ppl_ratio": self.ppl_ratio / sequences,
            "ppl_train": self.ppl_train / sequences,
            "pearson": (covariance / spread.sqrt()).clamp(-1.0, 1.0),
            "abs_diff_mean": self.log_abs / n,
            "abs_diff_max": torch.maximum(self.log_max, -self.log_min).clamp(min=0),
            "ratio_min": torch.where(n > 0, bounded(self.log_min).exp(), torch.nan),
            "ratio_max": torch.where(n > 0, bounded(self.log_max).exp(), torch.nan),
            **{f"ratio_{name}": value for name, value in histogram.summary().items()},
            "ratio_bounded": histogram.beyond / n,
            "log_ratio_seq_max": self.product_log_max,
            "tokens": n,
            "sequences": sequences,
        }


def _sequence_sums(ratios: Ratios) -> dict[str, Tensor]:
    """Returns sums over sequences with a trained token, in float64: products of thousands of ratios exceed float32."""
    trained = ratios.sequences.trained
    log = ratios.log_sequence.double()
    product = log.clamp(-_SEQUENCE_BOUND, _SEQUENCE_BOUND).exp() * trained
    return {
        "sequences": total(trained),
        "product": product.sum(),
        "product_square": product.square().sum(),
        "product_log_max": _largest(torch.where(trained, log, -torch.inf)),
        "ppl_ratio": _perplexity(ratios.log_geometric, ratios.sequences),
    }


def _perplexity(log_mean: Float[Tensor, "sequences 1"], sequences: Sequences) -> Tensor:
    """Returns the sum of exp(-log_mean) over sequences with a trained token."""
    return ((-log_mean.double()).clamp(max=_SEQUENCE_BOUND).exp() * sequences.trained).sum()


def total(values: Tensor) -> Tensor:
    """Returns the sum as a float64 scalar."""
    # Counting is twice as fast as adding bools.
    return (values.count_nonzero() if values.dtype == torch.bool else values.sum()).double()


def _dot(left: Tensor, right: Tensor) -> Tensor:
    return torch.dot(left.reshape(-1), right.reshape(-1)).double()


def _largest(values: Tensor) -> Tensor:
    """Returns the largest value as a float64 scalar; -inf for a batch without rows."""
    return values.amax().double() if values.numel() else values.new_full((), -torch.inf, dtype=torch.float64)
