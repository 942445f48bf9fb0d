"""The results of an experiment (methods x regimes x seeds) from its parquet file: means, intervals, ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trimtab.errors import TrimtabError
from trimtab.intervals import ANYTHING, Interval, interval, rule

FILE = "results.parquet"
COLLAPSED = 0.5  # a run that ends below this share of where it started
_NEEDED = ("method", "regime", "seed", "status", "error", "accuracy_before", "accuracy", "curve_steps", "curve")


@dataclass(frozen=True, eq=False)
class Score:
    """One method in one regime. `accuracy` is held-out greedy accuracy after training, mean over seeds.

    A run that diverged counts as 0: there is no policy to use. collapsed: runs that ended below half of their start,
    diverged ones included. rank: 1 for the highest mean of the regime. behind: by how much the regime's best method is
    ahead, paired by seed; its interval above 0 says that the lead is more than the spread of seeds.
    """

    seeds: tuple[int, ...]
    values: tuple[float, ...]
    accuracy: Interval
    rank: int
    behind: Interval
    collapsed: int
    diverged: int
    rows: tuple[Mapping[str, Any], ...] = field(repr=False)

    @property
    def fell(self) -> bool:
        """Whether most of its runs collapsed."""
        return 2 * self.collapsed > len(self.values)

    @property
    def tied(self) -> bool:
        """Whether it is as good as the best, as far as these seeds can tell."""
        return self.behind.low <= 0


@dataclass(frozen=True, eq=False)
class Grid:
    """`scores` by (method, regime); `refused` and `failed` say why a pair has none or fewer seeds than others."""

    methods: tuple[str, ...]
    regimes: Mapping[str, str]
    scores: Mapping[tuple[str, str], Score]
    refused: Mapping[tuple[str, str], str]
    failed: tuple[Mapping[str, Any], ...]
    before: float | None


def read_grid(path: Path) -> Grid:
    """The grid in `path`, a results.parquet or the folder that holds it. `TrimtabError` when there is none."""
    file = path / FILE if path.is_dir() else path
    try:
        table = pq.read_table(file)
    except FileNotFoundError:
        raise TrimtabError(f"no {file}: `trimtab compare --out {path}` writes it") from None
    except (pa.ArrowException, OSError) as error:
        raise TrimtabError(f"{file} is damaged ({' '.join(str(error).split())}): run `trimtab compare` again") from None
    missing = [name for name in _NEEDED if name not in table.schema.names]
    if missing:
        raise TrimtabError(f"{file} has no column {missing[0]!r}: it is not the result of a grid")
    rows = table.to_pylist()
    if not rows:
        raise TrimtabError(f"{file} holds no finished run yet: wait for the first one")
    return summarize(rows)


def summarize(rows: Sequence[Mapping[str, Any]]) -> Grid:
    """Methods and regimes in the order of their first row."""
    methods = tuple(dict.fromkeys(row["method"] for row in rows))
    regimes = {row["regime"]: row.get("regime_description") or "" for row in rows}
    refused = {(row["method"], row["regime"]): row["error"] for row in rows if row["status"] == "refused"}
    failed = tuple(row for row in rows if row["status"] == "failed")
    ended = [row for row in rows if row["status"] in ("done", "diverged")]
    scores: dict[tuple[str, str], Score] = {}
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
    return Grid(methods, regimes, scores, refused, failed, float(np.mean(starts)) if starts else None)


def _scores(groups: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Score]:
    values = {method: {row["seed"]: _value(row) for row in rows} for method, rows in groups.items()}
    means = {method: float(np.mean(list(by_seed.values()))) for method, by_seed in values.items()}
    best = max(means, key=lambda method: means[method], default="")
    return {
        method: Score(
            seeds=tuple(values[method]),
            values=tuple(values[method].values()),
            accuracy=_interval(list(values[method].values()), (0.0, 1.0)),
            rank=1 + sum(other > means[method] for other in means.values()),
            behind=_lead(values[best], values[method]),
            collapsed=sum(_value(row) < COLLAPSED * (row["accuracy_before"] or 0.0) for row in rows),
            diverged=sum(row["status"] == "diverged" for row in rows),
            rows=tuple(rows),
        )
        for method, rows in groups.items()
    }


def _value(row: Mapping[str, Any]) -> float:
    return 0.0 if row["accuracy"] is None else float(row["accuracy"])


def _lead(best: Mapping[int, float], other: Mapping[int, float]) -> Interval:
    """Equal seeds see the same prompts in the same order, so seeds are compared one by one."""
    shared = [best[seed] - other[seed] for seed in best if seed in other]
    return _interval(shared) if shared else Interval(math.nan, -math.inf, math.inf, 0)


def _interval(values: Sequence[float], limits: tuple[float, float] = ANYTHING) -> Interval:
    found = interval(values, limits)
    assert found is not None
    return found


def markdown(grid: Grid, methods: Sequence[str] | None = None) -> str:
    """Methods x regimes: mean [interval], rank; `†` where most runs collapsed. `methods`: in this order."""
    head = ["method", *grid.regimes]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for method in methods or grid.methods:
        cells = [words(grid, method, regime) for regime in grid.regimes]
        lines.append(f"| {' | '.join([f'`{method}`', *cells])} |")
    return "\n".join(lines)


def words(grid: Grid, method: str, regime: str) -> str:
    """One cell: `0.854 [0.836, 0.867] #1`, or a dash where nothing was trained."""
    score = grid.scores.get((method, regime))
    if score is None:
        return "–"
    best = "=" if score.tied and score.rank > 1 else ""
    mark = " †" if score.fell else ""
    interval = f"[{score.accuracy.low:.3f}, {score.accuracy.high:.3f}]" if len(score.values) > 1 else ""
    return " ".join(filter(None, [f"{score.accuracy.mean:.3f}", interval, f"#{score.rank}{best}"])) + mark


def legend(grid: Grid) -> str:
    """How the table is to be read."""
    counts = sorted({len(score.values) for score in grid.scores.values()} - {1})
    rules = " or ".join(f"[{rule(count)}]" for count in counts)
    return (
        f"Held-out greedy accuracy after training: mean over seeds{f' {rules}' if rules else ''}, #rank in the regime; "
        "=: as good as the best by the interval of the difference paired by seed, which says little below five seeds; "
        "†: most runs ended below half of where they started. A diverged run counts as 0."
    )
