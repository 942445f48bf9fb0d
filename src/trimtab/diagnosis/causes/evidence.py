"""The statistics that evidence consists of: shares, sizes, slopes, and the confidence that they give."""

from __future__ import annotations

import numpy as np


def share(values: np.ndarray) -> float:
    """Returns the share of True values; 0 without values."""
    return float(values.mean()) if len(values) else 0.0


def z_of(values: np.ndarray) -> float:
    """Returns the mean divided by its standard error; 0 for fewer than 20 values."""
    if len(values) < 20:
        return 0.0
    error = float(values.std()) / np.sqrt(len(values))
    return float(values.mean()) / max(error, 1e-12)


def correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Returns Pearson's correlation; 0 where a side is constant."""
    if len(x) < 3 or x.std() == 0 or y.std() == 0:
        return 0.0
    return float(np.corrcoef(x, y)[0, 1])


def centered(values: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Returns each value minus the mean of its group."""
    _, group = np.unique(group, return_inverse=True)
    return values - (np.bincount(group, values) / np.bincount(group))[group]


def slope_of(y: np.ndarray, x: np.ndarray, cluster: np.ndarray | None = None) -> tuple[float, float]:
    """Returns the least-squares slope of y over x, both centered, and its z; (0, 0) where x does not vary.

    The standard error allows for variances that differ, and for values of one cluster that depend on each other.
    """
    power = float(x @ x)
    if power <= 0:
        return 0.0, 0.0
    slope = float(x @ y) / power
    score = x * (y - slope * x)
    if cluster is not None:
        score = np.bincount(np.unique(cluster, return_inverse=True)[1], score)
    error = float(np.sqrt(np.square(score).sum())) / power
    return slope, slope / max(error, 1e-12)


def rms_of(shift: np.ndarray) -> float:
    """Returns the root mean square."""
    return float(np.sqrt(np.square(shift).mean()))


def usual_rms(shift: np.ndarray) -> float:
    """Returns the root mean square with values bounded at five usual ones, so that a few outliers do not decide it."""
    bound = 5 * 1.48 * float(np.median(np.abs(shift)))
    return rms_of(np.clip(shift, -bound, bound))


def log_size(shift: np.ndarray) -> np.ndarray:
    """Returns the logarithm of the size of each shift; sizes below 1e-6 count as that."""
    return np.log(np.abs(shift) + 1e-6)


def growth_of(old: np.ndarray, young: np.ndarray) -> tuple[float, float]:
    """Returns the ratio of the geometric mean sizes, and the z of its logarithm."""
    left, right = log_size(old), log_size(young)
    difference = float(left.mean() - right.mean())
    error = np.sqrt(left.var() / len(left) + right.var() / len(right))
    return float(np.exp(difference)), difference / max(float(error), 1e-12)


def confidence(strength: float, needed: float) -> float:
    """Returns a confidence in (0.5, 0.99] that grows with the ratio of a statistic to its threshold."""
    excess = max(strength / needed, 1.0)
    return round(float(min(0.99, 1.0 - 0.45 / excess)), 2)
