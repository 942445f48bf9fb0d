"""The specification of a chart over steps, and its resolution to the keys a run has logged."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from trimtab.report.groups import natural_key
from trimtab.runs.metric_catalog import Metric, metric
from trimtab.runs.reader import Run

QUANTILES = ("q01", "q05", "q50", "q95", "q99")
Lines = list[tuple[str, str]]
"""Label and key of each curve of a figure."""
Kind = Literal["lines", "quantiles", "accuracy", "layers"]


@dataclass(frozen=True)
class Chart:
    """The specification of one figure.

    `lines` maps legend labels to keys, by default to `about` alone; an empty label is replaced by the `<name>` that the
    pattern matched.
    `about` is the key whose row in the metric catalog gives the caption and the shaded healthy band.
    `what` replaces the caption where it would describe only one of several curves.
    `each` lists the healthy range of every curve in the caption.
    `bound` is a recipe key whose value is drawn as a horizontal line.
    """

    title: str
    about: str
    lines: Mapping[str, str] = field(default_factory=dict)
    kind: Kind = "lines"
    log: bool = False
    shade: bool = True
    each: bool = False
    bound: str = ""
    what: str = ""

    @property
    def caption(self) -> Metric:
        row = metric(self.about)
        if row is None:
            raise KeyError(self.about)
        return row

    def healthy(self, lines: Lines) -> str:
        """Returns the healthy range in words, one for all curves or one for each curve."""
        if not self.each:
            return self.caption.healthy
        rows = [(label, metric(key)) for label, key in lines]
        return "; ".join(f"{label} {row.healthy}" for label, row in rows if row)


# Totals of other keys matched by a pattern; drawn beside their parts they would repeat or dwarf them.
_TOTALS = frozenset({"reward/mean", "reward/std", "reward/failed", "reject/tokens", "reject/sequences"})


def resolve(chart: Chart, run: Run) -> Lines:
    """Returns label and key of each curve that holds numbers in `run`, patterns expanded; empty without any."""
    lines: Lines = []
    for pattern in (chart.lines or {"": chart.about}).items():
        # A total with a single part equals that part and is drawn once.
        lines += [
            line for line in _expand(*pattern, run) if not any(_repeats(run, line[1], other) for _, other in lines)
        ]
    return [] if chart.kind == "quantiles" and len(lines) < len(QUANTILES) else lines


def _repeats(run: Run, key: str, other: str) -> bool:
    """Whether the reward or rejection curve `key` equals the curve `other` at every step."""
    family = key.partition("/")[0]
    if family not in ("reward", "reject"):
        return False
    return all(np.array_equal(a, b) for a, b in zip(run.series(key), run.series(other), strict=True))


def _expand(label: str, key: str, run: Run) -> list[tuple[str, str]]:
    if "<" not in key:
        return [(label, key)] if len(run.series(key)[0]) else []
    pattern = re.compile(re.sub(r"<[a-z]+>", "([^/]+)", key))
    matches = [(match[1], match[0]) for match in map(pattern.fullmatch, run.keys) if match]
    matches.sort(key=lambda pair: natural_key(pair[0]))
    return [(name, match) for name, match in matches if match not in _TOTALS and len(run.series(match)[0])]
