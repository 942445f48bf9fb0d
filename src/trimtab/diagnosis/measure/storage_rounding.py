"""Detects the rounding log-probs were stored with, and the k3 it causes by itself."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

_BIAS = 127
_DECIMALS = 6
"""Largest number of decimals that is coarser than float32."""
_MIN_VALUES = 20
"""Fewest nonzero values on a coarse grid for it to be detected."""
_FIRST_PART = 4096  # values tested first, which rule out most grids


class RoundingDetector:
    """Detects the grid of one column of log-probs: the grids that contain all values so far, and their exponents."""

    def __init__(self) -> None:
        self._bfloat16 = self._float16 = True
        self._decimals = 1
        self._exponents = np.zeros(256, dtype=np.int64)

    def add(self, values: np.ndarray) -> None:
        """Adds finite values, float32 (tokens,)."""
        for part in (values[:_FIRST_PART], values[_FIRST_PART:]):
            bits = part.view(np.int32)
            self._bfloat16 = self._bfloat16 and not (bits & 0xFFFF).any()
            with np.errstate(over="ignore"):
                self._float16 = self._float16 and bool((part.astype(np.float16).astype(np.float32) == part).all())
            exact = part.astype(np.float64)
            while self._decimals <= _DECIMALS and (exact.round(self._decimals).astype(np.float32) != part).any():
                self._decimals += 1
        self._exponents += np.bincount((values.view(np.int32) >> 23) & 0xFF, minlength=256)

    @property
    def grid(self) -> str:
        """bfloat16, float16, `d decimals` or float32; the coarsest if the values lie on several."""
        if self._bfloat16 and self._exponents[1:].sum() >= _MIN_VALUES:
            return "bfloat16"
        if self._float16 and self._exponents[1:].sum() >= _MIN_VALUES:
            return "float16"
        # Where float32 itself is no finer than the decimals, every value seems to have been rounded to them.
        fine = np.arange(256) - _BIAS - 23 < np.log2(10.0**-self._decimals) - 3
        if self._decimals <= _DECIMALS and (self._exponents * fine)[1:].sum() >= _MIN_VALUES:
            return f"{self._decimals} decimal{'s' if self._decimals > 1 else ''}"
        return "float32"

    @property
    def variance(self) -> float:
        """Mean square of the rounding error, assumed uniform within half a grid step on either side."""
        grid, exponent = self.grid, np.arange(256.0) - _BIAS
        if grid.startswith(str(self._decimals)):
            step = np.full(256, 10.0**-self._decimals)
        elif grid == "float16":
            step = np.exp2(np.maximum(exponent - 10, -24.0))
        else:
            step = np.exp2(exponent - (7 if grid == "bfloat16" else 23))
        step[0] = 0.0  # zero is on every grid
        count = self._exponents.sum()
        return float((self._exponents * np.square(step)).sum() / (12 * count)) if count else 0.0


def rounding_floor(columns: Mapping[str, RoundingDetector]) -> tuple[float, str]:
    """Returns the k3 from rounding alone, which is half the sum of the columns' variances, and a sentence about it."""
    value = 0.5 * sum(column.variance for column in columns.values())
    stored = " and ".join(f"{name} is stored in {column.grid}" for name, column in columns.items())
    return value, f"{stored}: rounding alone makes a k3 of {value:.1e}"
