"""Numbers of a diagnosis as text, and the names of its figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from trimtab.diagnosis.records import MismatchSize, read_table
from trimtab.intervals import Interval
from trimtab.runs.metric_catalog import band_text, bounds, judge, k3_ranges
from trimtab.text import beside, format_number, number, short_exponent

FIGURES: Mapping[str, tuple[str, str]] = {key: tuple(text) for key, text in read_table("texts.toml")["figures"].items()}
"""Name and meaning of each figure, in reading order."""


def format_interval(interval: Interval | None, form: Callable[[float], str] = format_number) -> str:
    """Formats the ends as `1.7e-4 to 2.1e-4`; empty if they are not known."""
    if interval is None or not (math.isfinite(interval.low) and math.isfinite(interval.high)):
        return ""
    return f"{form(interval.low)} to {form(interval.high)}"


def overrides_text(overrides: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={number(value)}" for name, value in overrides.items())


def _form(key: str) -> Callable[[float], str]:
    if key in ("ratio_mean", "ppl_ratio", "pearson"):  # near 1, where four digits are too few
        return lambda value: short_exponent(f"{value:.5g}") if math.isfinite(value) else "–"
    return format_number if key in ("k1", "k2", "k3", "chi2_token") else number


def figure(size: MismatchSize, key: str) -> str:
    """Formats a statistic of the mismatch, with enough digits to tell it from the ends of its healthy range."""
    return beside(size.mismatch[key], bounds(f"mismatch/{key}"), _form(key))


def interval_of(size: MismatchSize, key: str) -> str:
    """Formats the 95% interval of a statistic; empty if it has none."""
    return format_interval(size.intervals.get(key), _form(key))


def with_interval(size: MismatchSize, key: str) -> str:
    """Formats a statistic as `1.9e-4 (1.7e-4 to 2.1e-4)`, without parentheses if it has no interval of any width."""
    ends, value = interval_of(size, key), figure(size, key)
    return f"{value} ({ends})" if ends and ends != f"{value} to {value}" else value


def outside(size: MismatchSize) -> dict[str, str]:
    """Returns the statistics outside their healthy range, with the range as text, as report.html marks them."""
    keys = (key for key, value in size.mismatch.items() if judge(f"mismatch/{key}", value) == "outside")
    return {key: band_text(f"mismatch/{key}") for key in keys}


def range_text(size: MismatchSize) -> str:
    """Returns the description of the published range that contains k3."""
    if size.verdict == "rounding":
        return "no more than the rounding of the stored log-probs causes"
    k3_range = k3_ranges()[size.verdict]
    return k3_range.below if size.mismatch["k3"] < k3_range.low else k3_range.text
