"""How much of the variance of some values groups explain."""

from __future__ import annotations

import numpy as np


def explained(values: np.ndarray, group: np.ndarray, least: int = 1) -> float:
    """Returns the share of the variance that groups of at least `least` values explain beyond chance.

    Beyond chance: more than groups without a meaning explain, by three standard deviations. 0 for a single group.
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
