"""The catalog of run metrics: description, formula, healthy range, and what to do outside it.

`metrics.toml` is the one table behind the captions and shaded bands of report.html, the verdicts of `trimtab diagnose`
and docs/metrics.md; `metric_ranges.py` judges values by it.
"""

from __future__ import annotations

import importlib.resources
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

# A quantile row must not document whatever else is logged under its prefix.
_PLACE = {"<quantile>": r"q\d\d"}


@dataclass(frozen=True)
class Range:
    """A named part of a metric's scale: values above the range before it, up to `high`. `text` says what they mean.

    `low`: from where values are common, where that is not the end of the range before.
    """

    name: str
    high: float
    text: str
    low: float | None = None


@dataclass(frozen=True)
class Metric:
    """One row of the table. `low` and `high` bound the healthy band where numbers can; `healthy` says it in words.

    `ranges`: the whole scale in named parts, in ascending order, where one bound says too little. `of`: the metric of
    whose share the bounds are, where a count alone says too little.
    """

    key: str
    what: str
    formula: str
    unit: str
    healthy: str
    action: str
    low: float | None = None
    high: float | None = None
    ranges: tuple[Range, ...] = ()
    of: str = ""

    def matches(self, key: str) -> bool:
        """Whether this row documents `key`. In the row's key `<quantile>` stands for q01, q50, ..., any other `<name>`
        for whatever has no slash."""
        parts = re.split(r"(<[a-z]+>)", self.key)
        pattern = "".join(_PLACE.get(part, "[^/]+") if part.startswith("<") else re.escape(part) for part in parts)
        return re.fullmatch(pattern, key) is not None

    @property
    def is_pattern(self) -> bool:
        return "<" in self.key


@dataclass(frozen=True)
class Section:
    """A heading of the documentation and the metrics under it."""

    title: str
    about: str
    metrics: tuple[Metric, ...]


@cache
def sections() -> tuple[Section, ...]:
    """The whole table, in the order it is documented."""
    text = (importlib.resources.files("trimtab.runs") / "metrics.toml").read_text(encoding="utf-8")
    return tuple(
        Section(part["title"], part["about"], tuple(_metric(row) for row in part["metric"]))
        for part in tomllib.loads(text)["section"]
    )


def _metric(row: Mapping[str, Any]) -> Metric:
    return Metric(**{**row, "ranges": tuple(Range(**part) for part in row.get("ranges", ()))})


def metric(key: str) -> Metric | None:
    """The row that documents `key`: an exact one before a pattern, None when there is none."""
    rows = [row for part in sections() for row in part.metrics]
    exact = next((row for row in rows if row.key == key), None)
    return exact or next((row for row in rows if row.is_pattern and row.matches(key)), None)


def undocumented(keys: Iterable[str]) -> list[str]:
    """Those of `keys` that no row documents, sorted. A run's metrics must give an empty list."""
    return sorted({key for key in keys if metric(key) is None})
