"""The table of an experiment (methods x regimes x seeds): means, intervals and ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trimtab.intervals import UNBOUNDED, SeedMean, interval_method, seed_interval

COLLAPSED = 0.5  # a run has collapsed if it ends below this share of its initial accuracy


@dataclass(frozen=True, eq=False)
class MethodScore:
    """The result of one method in one regime.

    accuracy: held-out greedy accuracy after training, mean over seeds; a diverged run counts as 0.
    collapsed: number of runs that ended below half of their initial accuracy, diverged ones included.
    rank: 1 for the highest mean of the regime.
    behind: accuracy of the regime's best method minus this one, paired by seed; an interval above 0 means that the
    difference exceeds the spread of seeds.
    """

    seeds: tuple[int, ...]
    values: tuple[float, ...]
    accuracy: SeedMean
    rank: int
    behind: SeedMean
    collapsed: int
    diverged: int
    rows: tuple[Mapping[str, Any], ...] = field(repr=False)

    @property
    def collapsed_mostly(self) -> bool:
        """Whether most of its runs collapsed."""
        return 2 * self.collapsed > len(self.values)

    @property
    def interval_text(self) -> str:
        """`[0.836, 0.867]`; empty for a single seed."""
        return f"[{self.accuracy.low:.3f}, {self.accuracy.high:.3f}]" if len(self.values) > 1 else ""

    @property
    def rank_text(self) -> str:
        """`#1`, or `#2=` for a method that the seeds do not separate from the best one."""
        return f"#{self.rank}{'=' if self.is_best and self.rank > 1 else ''}"

    @property
    def is_best(self) -> bool:
        """Whether the seeds do not separate it from the best method of the regime."""
        return self.behind.low <= 0


@dataclass(frozen=True, eq=False)
class ComparisonTable:
    """The results of an experiment: `scores` by (method, regime).

    refused: the reason, by (method, regime), why a pair was not trained. failed: rows of runs that ended with an
    error. before: mean accuracy before training.
    """

    methods: tuple[str, ...]
    regimes: Mapping[str, str]
    scores: Mapping[tuple[str, str], MethodScore]
    refused: Mapping[tuple[str, str], str]
    failed: tuple[Mapping[str, Any], ...]
    before: float | None


def summarize(rows: Sequence[Mapping[str, Any]]) -> ComparisonTable:
    """Returns the table of `rows`, with methods and regimes in the order of their first row."""
    methods = tuple(dict.fromkeys(row["method"] for row in rows))
    regimes = {row["regime"]: row.get("regime_description") or "" for row in rows}
    refused = {(row["method"], row["regime"]): row["error"] for row in rows if row["status"] == "refused"}
    failed = tuple(row for row in rows if row["status"] == "failed")
    ended = [row for row in rows if row["status"] in ("done", "diverged")]
    scores: dict[tuple[str, str], MethodScore] = {}
    for regime in regimes:
        groups = {
            method: sorted(
                (row for row in ended if row["method"] == method and row["regime"] == regime),
                key=lambda row: row["seed"],
            )
            for method in methods
        }
        scores |= {(m, regime): score for m, score in _scores({m: g for m, g in groups.items() if g}).items()}
    starts = [row["accuracy_before"] for row in ended if row["accuracy_before"] is not None]
    return ComparisonTable(methods, regimes, scores, refused, failed, float(np.mean(starts)) if starts else None)


def _scores(groups: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, MethodScore]:
    values = {method: {row["seed"]: _value(row) for row in rows} for method, rows in groups.items()}
    means = {method: float(np.mean(list(by_seed.values()))) for method, by_seed in values.items()}
    best = max(means, key=lambda method: means[method], default="")
    return {
        method: MethodScore(
            seeds=tuple(values[method]),
            values=tuple(values[method].values()),
            accuracy=_interval(list(values[method].values()), (0.0, 1.0)),
            rank=1 + sum(other > means[method] for other in means.values()),
            behind=_paired_lead(values[best], values[method]),
            collapsed=sum(_value(row) < COLLAPSED * (row["accuracy_before"] or 0.0) for row in rows),
            diverged=sum(row["status"] == "diverged" for row in rows),
            rows=tuple(rows),
        )
        for method, rows in groups.items()
    }


def _value(row: Mapping[str, Any]) -> float:
    return 0.0 if row["accuracy"] is None else float(row["accuracy"])


def _paired_lead(best: Mapping[int, float], other: Mapping[int, float]) -> SeedMean:
    """Returns the lead of the best method paired by seed: runs of one seed see the same prompts in the same order."""
    differences = [best[seed] - other[seed] for seed in best if seed in other]
    return _interval(differences) if differences else SeedMean(math.nan, -math.inf, math.inf, 0)


def _interval(values: Sequence[float], limits: tuple[float, float] = UNBOUNDED) -> SeedMean:
    result = seed_interval(values, limits)
    assert result is not None
    return result


def markdown(table: ComparisonTable, methods: Sequence[str] | None = None) -> str:
    """Returns a Markdown table, methods x regimes: mean [interval], rank, `†` where most runs collapsed.

    `methods` gives the order of the rows.
    """
    head = ["method", *table.regimes]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for method in methods or table.methods:
        cells = [cell_text(table, method, regime) for regime in table.regimes]
        lines.append(f"| {' | '.join([f'`{method}`', *cells])} |")
    return "\n".join(lines)


def cell_text(table: ComparisonTable, method: str, regime: str) -> str:
    """Returns one cell, such as `0.854 [0.836, 0.867] #1`, or a dash where nothing was trained."""
    score = table.scores.get((method, regime))
    if score is None:
        return "–"
    mark = "†" if score.collapsed_mostly else ""
    return " ".join(filter(None, [f"{score.accuracy.mean:.3f}", score.interval_text, score.rank_text, mark]))


def legend(table: ComparisonTable) -> str:
    """Returns the legend of the table in words."""
    counts = sorted({len(score.values) for score in table.scores.values()} - {1})
    rules = " or ".join(f"[{interval_method(count)}]" for count in counts)
    return (
        f"Held-out greedy accuracy after training: mean over seeds{f' {rules}' if rules else ''}, #rank in the regime; "
        "=: as good as the best by the interval of the difference paired by seed, which says little below five seeds; "
        "†: most runs ended below half of where they started. A diverged run counts as 0."
    )
