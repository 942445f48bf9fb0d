"""pass@k, and how sure a mean over problems is."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from trimtab.errors import TrimtabError

RESAMPLES = 2000


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate of P(at least one of k samples is right) from n samples of which c are (Chen et al. 2021).

    1 - C(n-c, k) / C(n, k). Raises `TrimtabError` unless 0 <= c <= n and 1 <= k <= n: for k > n it is undefined.
    """
    if not 0 <= c <= n:
        raise TrimtabError(f"pass@k: {c} correct of {n} samples is impossible")
    if not 1 <= k <= n:
        raise TrimtabError(
            f"pass@{k} needs at least {k} samples per problem and k >= 1, there are {n}; draw more samples"
        )
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def bootstrap(values: Sequence[float], *, seed: int, level: float = 0.95) -> tuple[float, float]:
    """Percentile interval of the mean when problems are drawn again with replacement; deterministic by `seed`."""
    data = np.asarray(values, dtype=np.float64)
    rng = np.random.default_rng(seed)
    means = [data[rng.integers(len(data), size=len(data))].mean() for _ in range(RESAMPLES)]
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
