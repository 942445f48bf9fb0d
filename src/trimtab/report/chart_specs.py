"""The specification of a chart over steps, and which of its curves a run has."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from trimtab.runs.metric_catalog import Metric, metric
from trimtab.runs.reader import Run

QUANTILES = ("q01", "q05", "q50", "q95", "q99")
Kind = Literal["lines", "quantiles", "accuracy", "layers"]


@dataclass(frozen=True)
class Chart:
    """One figure. `lines` pairs a legend label with a key; a label "" is taken from the `<name>` a pattern matched.

    `about` is the key whose row in the table of metrics gives the caption and the shaded healthy band. `what` says what
    several curves have in common, where the sentence of one key would not; `each` gives every curve its own healthy
    range in the caption. `bound` names a number of the recipe to draw as a level line.
    """

    title: str
    about: str
    lines: tuple[tuple[str, str], ...] = ()
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


@dataclass(frozen=True)
class Drawn:
    """A chart with the keys one run really has."""

    chart: Chart
    lines: list[tuple[str, str]] = field(default_factory=list)

    @property
    def healthy(self) -> str:
        """The healthy range in words, one for all curves or one for each."""
        if not self.chart.each:
            return self.chart.caption.healthy
        rows = [(label, metric(key)) for label, key in self.lines]
        return "; ".join(f"{label} {row.healthy}" for label, row in rows if row)


# Totals of other keys: drawn as curves of their own they would only repeat or dwarf the parts.
_NOT_A_PART = frozenset({"reward/mean", "reward/std", "reward/failed", "reject/tokens", "reject/sequences"})


def resolve(chart: Chart, run: Run) -> Drawn | None:
    """The chart with patterns expanded to the keys that hold numbers in `run`; None when there are none."""
    lines: list[tuple[str, str]] = []
    for line in (found for label, key in chart.lines for found in _expand(label, key, run)):
        # A total with a single part is that part: one curve, not two on top of each other.
        if not any(_same(run, line[1], known) for _, known in lines):
            lines.append(line)
    if chart.kind == "quantiles" and len(lines) < len(QUANTILES):
        return None
    return Drawn(chart, lines) if lines else None


def _same(run: Run, key: str, other: str) -> bool:
    """Whether a pattern's key repeats another curve step by step."""
    family = key.partition("/")[0]
    if family not in ("reward", "reject"):
        return False
    return all(np.array_equal(a, b) for a, b in zip(run.series(key), run.series(other), strict=True))


def _expand(label: str, key: str, run: Run) -> list[tuple[str, str]]:
    if "<" not in key:
        return [(label, key)] if len(run.series(key)[0]) else []
    pattern = re.compile(re.sub(r"<[a-z]+>", "([^/]+)", key))
    found = [(match[1], match[0]) for match in map(pattern.fullmatch, run.keys) if match]
    found.sort(key=lambda pair: _natural(pair[0]))
    return [(name, match) for name, match in found if match not in _NOT_A_PART and len(run.series(match)[0])]


def _natural(name: str) -> tuple[bool, int, str]:
    """Numbers by their size and before words: layer 2 before layer 10 before the logits."""
    return (False, int(name), "") if name.isdecimal() else (True, 0, name)
