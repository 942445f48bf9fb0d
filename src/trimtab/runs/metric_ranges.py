"""Judges metrics by the healthy ranges of `metrics.toml`, for report.html and `trimtab diagnose`."""

from __future__ import annotations

import math
from typing import Any, Literal

from trimtab.runs.metric_catalog import Metric, Range, metric

K3 = "mismatch/k3"

State = Literal["healthy", "outside", ""]
"""Whether a value is inside or outside its healthy band; empty if not judged (no band, or not a number)."""


def judge(key: str, value: Any) -> State:
    """Returns the state of the metric `key` at `value` by its healthy band.

    For a row with `of`, `value` is the share.
    """
    row = metric(key)
    if row is None or (row.low is None and row.high is None):
        return ""
    if not isinstance(value, int | float) or isinstance(value, bool) or math.isnan(value):
        return ""
    inside = (row.low is None or value >= row.low) and (row.high is None or value <= row.high)
    return "healthy" if inside else "outside"


def band_text(key: str) -> str:
    """Returns the healthy band in numbers: `0.95 to 1`, `at most 0.05` or `at least 0.8`; empty without a band."""
    row = metric(key)
    if row is None or (row.low is None and row.high is None):
        return ""
    if row.low is None:
        return f"at most {row.high:g}"
    return f"at least {row.low:g}" if row.high is None else f"{row.low:g} to {row.high:g}"


def bounds(key: str) -> list[float]:
    """Returns the ends of the healthy band and of the named ranges of the metric `key`."""
    row = metric(key)
    if row is None:
        return []
    return [bound for bound in (row.low, row.high, *(part.high for part in row.ranges)) if bound is not None]


def k3_ranges() -> dict[str, Range]:
    """Returns the named ranges of k3 by name, ascending: exact, dense, small-dense, moe, beyond."""
    return {part.name: part for part in _k3().ranges}


def k3_range(k3: float) -> Range:
    """Returns the named range that contains `k3`; NaN belongs to the last one."""
    return next((part for part in _k3().ranges if k3 <= part.high), _k3().ranges[-1])


def _k3() -> Metric:
    row = metric(K3)
    assert row is not None
    return row
