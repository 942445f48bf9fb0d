"""Figures and tables of the pages about the laboratory, from the folder that `trimtab compare` leaves.

    python docs/figures/grid.py runs/default --dots laboratory.png
    python docs/figures/grid.py runs/tails --curves tails.png --metric mismatch/log_ratio_seq_max
    python docs/figures/grid.py runs/tails --columns accuracy log_ratio_seq_worst grad_norm_max
    python docs/figures/grid.py runs/schedules --quarters mismatch/k3
    python docs/figures/grid.py runs/tools --pair seq-alp token-alp --pair seq-alp seq-bypass

Dots: final accuracy of every method in every regime, seed by seed. Curves: one metric over steps, mean over seeds with
their range. Columns: Markdown, mean [lowest, highest] over seeds. Quarters: Markdown, mean over seeds and steps of each
quarter of the runs. Pairs: Markdown, how much more accurate the first method is than the second, paired by seed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pyarrow.parquet as pq
from canvas import BLUE, GREEN, IMAGES, ORANGE, PURPLE, RC, SKY, VERMILLION, number, save, table

from trimtab.intervals import seed_interval
from trimtab.report.experiment_page import rank_methods, write_accuracy_figure

COLORS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, "#000000")
Row = dict[str, Any]


def read(grid: Path) -> list[Row]:
    """Finished runs. One that diverged has accuracy 0, as in the grid's own table."""
    rows = pq.read_table(grid / "results.parquet").to_pylist()
    return [row | ({"accuracy": 0.0} if row["status"] == "diverged" else {}) for row in rows if row["seed"] is not None]


def distinct(rows: list[Row], key: str) -> list[str]:
    return list(dict.fromkeys(row[key] for row in rows))


def dots(rows: list[Row], path: Path) -> None:
    write_accuracy_figure(rank_methods(rows), path)


def curves(grid: Path, rows: list[Row], metric: str, path: Path, log: bool) -> None:
    regimes, methods = distinct(rows, "regime"), distinct(rows, "method")
    size = (4.6 * len(regimes) + 0.4, 3.6)
    figure, panels = plt.subplots(1, len(regimes), figsize=size, sharey=True, constrained_layout=True, squeeze=False)
    for axes, regime in zip(panels[0], regimes, strict=True):
        for method, color in zip(methods, COLORS, strict=False):
            here = [row for row in rows if (row["regime"], row["method"]) == (regime, method)]
            steps, values = series([grid / row["run"] for row in here], metric)
            if len(steps):
                axes.fill_between(steps, values.min(0), values.max(0), color=color, alpha=0.15, linewidth=0)
                axes.plot(steps, values.mean(0), color=color, label=method)
        axes.set_title(regime)
        axes.set_xlabel("step")
        if log:
            axes.set_yscale("log")
    panels[0, 0].set_ylabel(metric)
    panels[0, -1].legend(fontsize=8)
    save(figure, path)


def series(runs: list[Path], metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps (n,) that all runs logged and their values (runs, n)."""
    found = []
    for run in runs:
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        found.append({row["step"]: row[metric] for row in lines if row.get(metric) is not None})
    steps = sorted(set.intersection(*map(set, found))) if found else []
    return np.array(steps), np.array([[one[step] for step in steps] for one in found])


def columns(rows: list[Row], names: list[str]) -> str:
    cells = []
    for regime in distinct(rows, "regime"):
        for method in distinct(rows, "method"):
            here = [row for row in rows if (row["regime"], row["method"]) == (regime, method)]
            if here:
                cells.append([regime, f"`{method}`", *(spread([row[name] for row in here]) for name in names)])
    return table(["regime", "method", *names], cells)


def quarters(grid: Path, rows: list[Row], metric: str) -> str:
    cells = []
    for regime in distinct(rows, "regime"):
        for method in distinct(rows, "method"):
            here = [row for row in rows if (row["regime"], row["method"]) == (regime, method)]
            steps, values = series([grid / row["run"] for row in here], metric)
            if len(steps):
                parts = np.array_split(values.mean(0), 4)
                cells.append([regime, f"`{method}`", *(number(float(part.mean())) for part in parts)])
    return table(["regime", "method", *(f"{metric}, quarter {part}" for part in range(1, 5))], cells)


def pairs(rows: list[Row], chosen: list[tuple[str, str]]) -> str:
    cells = []
    for first, second in chosen:
        differences = []
        for regime in distinct(rows, "regime"):
            one, other = (by_seed(rows, regime, method) for method in (first, second))
            lead = seed_interval([one[seed] - other[seed] for seed in one if seed in other])
            differences.append("-" if lead is None else f"{lead.mean:+.3f} [{lead.low:+.3f}, {lead.high:+.3f}]")
        cells.append([f"`{first}` over `{second}`", *differences])
    return table(["", *distinct(rows, "regime")], cells)


def by_seed(rows: list[Row], regime: str, method: str) -> dict[int, float]:
    return {row["seed"]: row["accuracy"] for row in rows if (row["regime"], row["method"]) == (regime, method)}


def spread(values: list[float | None]) -> str:
    numbers = [value for value in values if value is not None]
    if not numbers:
        return "-"
    return f"{number(float(np.mean(numbers)))} [{number(min(numbers))}, {number(max(numbers))}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("grid", type=Path)
    parser.add_argument("--dots", help="file name in docs/images")
    parser.add_argument("--curves", help="file name in docs/images")
    parser.add_argument("--metric", default="mismatch/k3")
    parser.add_argument("--log", action="store_true", help="logarithmic axis of the metric")
    parser.add_argument("--regimes", nargs="+")
    parser.add_argument("--methods", nargs="+")
    parser.add_argument("--columns", nargs="+", default=[])
    parser.add_argument("--quarters", metavar="METRIC")
    parser.add_argument("--pair", nargs=2, action="append", default=[], metavar="METHOD")
    given = parser.parse_args()
    rows = [
        row
        for row in read(given.grid)
        if row["regime"] in (given.regimes or [row["regime"]]) and row["method"] in (given.methods or [row["method"]])
    ]
    with plt.rc_context(RC):
        if given.dots:
            dots(rows, IMAGES / given.dots)
        if given.curves:
            curves(given.grid, rows, given.metric, IMAGES / given.curves, given.log)
    if given.columns:
        print(columns(rows, given.columns))
    if given.quarters:
        print(quarters(given.grid, rows, given.quarters))
    if given.pair:
        print(pairs(rows, given.pair))


if __name__ == "__main__":
    main()
