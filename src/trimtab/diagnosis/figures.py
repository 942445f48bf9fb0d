"""Numbers of a diagnosis as text, and the names of its figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Figure:
    """A statistic of the mismatch as text."""

    name: str
    meaning: str
    value: str  # with enough digits to tell it from the ends of its healthy range
    interval: str  # at 95%; "" without an interval
    healthy: str  # the healthy range
    judged: str  # healthy or outside, as report.html marks it; "" without a healthy range

    @classmethod
    def of(cls, size: MismatchSize, key: str) -> Figure:
        metric, value, form = f"mismatch/{key}", size.mismatch[key], _form(key)
        interval = format_interval(size.intervals.get(key), form)
        text = beside(value, bounds(metric), form)
        return cls(*FIGURES.get(key, (key, "")), text, interval, band_text(metric), judge(metric, value))

    @property
    def text(self) -> str:
        """The value as `1.9e-4 (1.7e-4 to 2.1e-4)`, or alone if its interval is missing or has no width."""
        has_width = self.interval and self.interval != f"{self.value} to {self.value}"
        return f"{self.value} ({self.interval})" if has_width else self.value


def range_text(size: MismatchSize) -> str:
    """Returns the description of the published range that contains k3."""
    if size.verdict == "rounding":
        return "no more than the rounding of the stored log-probs causes"
    k3_range = k3_ranges()[size.verdict]
    return k3_range.below if size.mismatch["k3"] < k3_range.low else k3_range.text
