"""The catalog of run metrics (description, formula, healthy range, remedy), and functions that judge a value by it.

`metrics.toml` is the single source for the captions and shaded bands of report.html, the verdicts of
`trimtab diagnose` and the site's page of metrics.
"""

from __future__ import annotations

import importlib.resources
import math
import re
import tomllib
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Literal

K3 = "mismatch/k3"


@dataclass(frozen=True)
class ScalePart:
    """A named part of a metric's scale: values above the previous range, up to `high`, and their meaning."""

    name: str
    high: float
    text: str
    low: float = -math.inf  # where typical values start, if that is not the end of the previous range
    below: str = ""  # the meaning of values below `low`


@dataclass(frozen=True)
class Metric:
    """One row of the catalog."""

    key: str
    what: str
    formula: str
    unit: str
    healthy: str  # the healthy band in words
    action: str
    low: float | None = None  # bounds of the band, if it can be given in numbers
    high: float | None = None
    ranges: tuple[ScalePart, ...] = ()  # of the whole scale, ascending, for metrics that need more than one bound
    of: str = ""  # another metric; the bounds then apply to the metric divided by it
    chart: str = ""  # title of its chart in report.html; metrics with the same title share a chart
    curve: str = ""  # name of its curve there, before the `<name>` that a pattern matched
    log: bool = False  # whether the axis is logarithmic
    bound: str = ""  # key of the recipe whose value is drawn as a level line
    verdict: str = ""  # what a value outside the band means for a run: a role of `report.health`
    called: str = ""  # name of the metric in the sentence of a verdict

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """The pattern of the keys that this row documents, with a group for each `<name>`; a name has no slash.

        `<quantile>` matches q01, q50, ... only.
        """
        names = {part: r"(q\d\d)" if part == "<quantile>" else "([^/]+)" for part in re.findall("<[a-z]+>", self.key)}
        return re.compile("".join(names.get(part) or re.escape(part) for part in re.split("(<[a-z]+>)", self.key)))


@dataclass(frozen=True)
class Section:
    """A section of the documentation with its metrics."""

    title: str
    about: str
    metrics: tuple[Metric, ...]


@cache
def sections() -> tuple[Section, ...]:
    """Returns the whole catalog in the order of the documentation."""
    text = (importlib.resources.files("trimtab.runs") / "metrics.toml").read_text(encoding="utf-8")
    return tuple(
        Section(
            part["title"],
            part["about"],
            tuple(
                Metric(**{**row, "ranges": tuple(ScalePart(**given) for given in row.get("ranges", ()))})
                for row in part["metric"]
            ),
        )
        for part in tomllib.loads(text)["section"]
    )


@cache
def metric(key: str) -> Metric | None:
    """Returns the row that documents `key`, an exact match before a pattern; None without any."""
    rows = [row for part in sections() for row in part.metrics]
    exact = next((row for row in rows if row.key == key), None)
    return exact or next((row for row in rows if row.pattern.fullmatch(key)), None)


def with_verdict(role: str) -> dict[str, str]:
    """Returns key -> `called` of the metrics with this role in the verdict of a run."""
    return {row.key: row.called for part in sections() for row in part.metrics if row.verdict == role}


def judge(key: str, value: Any) -> Literal["healthy", "outside", ""]:
    """Returns `healthy` or `outside`, by the healthy band of the metric `key`; empty without a band or a number.

    For a row with `of`, `value` is the metric divided by that other metric.
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


def k3_ranges() -> dict[str, ScalePart]:
    """Returns the named ranges of k3 by name, ascending: exact, dense, small-dense, moe, beyond."""
    row = metric(K3)
    assert row is not None
    return {part.name: part for part in row.ranges}


def k3_range(k3: float) -> ScalePart:
    """Returns the named range that contains `k3`; NaN belongs to the last one."""
    ranges = list(k3_ranges().values())
    return next((part for part in ranges if k3 <= part.high), ranges[-1])
