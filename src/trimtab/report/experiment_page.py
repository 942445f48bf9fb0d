"""The page of an experiment: a shaded table of methods x regimes, accuracy curves, and mismatch metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trimtab.pages.render import render, short
from trimtab.pages.svg import BLUE, CYCLE, INK, RC, STYLES, finish, to_svg
from trimtab.report.comparison_table import ComparisonTable, MethodScore, cell_text, legend
from trimtab.runs.atomic import write_output

TITLE = "Methods under controlled mismatch"
# Up to this number of methods all curves share one figure; more methods get a figure each.
MAX_SHARED_FIGURE = len(CYCLE)
ABOVE, BELOW = (0, 114, 178), (213, 94, 0)
MAX_OPACITY = 0.5  # opacity of the strongest shade at which text is readable in both themes


def write_experiment_page(
    grid: ComparisonTable,
    path: Path,
    *,
    title: str = TITLE,
    notes: Sequence[str] = (),
    methods: Sequence[str] | None = None,
    verdict: str = "",
) -> Path:
    """Write the page and return `path`.

    `notes` are sentences shown above the table, `verdict` is shown above them. `methods` gives the order of the rows.
    """
    values = {
        "title": title,
        "notes": list(notes),
        "verdict": verdict,
        "facts": _facts(grid),
        "legend": legend(grid),
        "regimes": [{"name": name, "description": text} for name, text in grid.regimes.items()],
        "rows": [
            {"method": method, "cells": [_cell(grid, method, regime) for regime in grid.regimes]}
            for method in methods or grid.methods
        ],
        "details": [
            {"regime": regime, "figures": _figures(grid, regime), "rows": _details(grid, regime)}
            for regime in grid.regimes
        ],
        "refused": [f"{regime}, {method}: {reason}" for (method, regime), reason in grid.refused.items()],
        "failed": [f"{row['regime']}, {row['method']}, seed {row['seed']}: {row['error']}" for row in grid.failed],
    }
    return write_output(path, render("grid.html.j2", values).encode())


def _facts(grid: ComparisonTable) -> list[tuple[str, str]]:
    rows = [row for score in grid.scores.values() for row in score.rows]
    seconds = sum(row.get("seconds") or 0.0 for row in rows)
    facts = [
        ("runs", str(len(rows))),
        ("methods", str(len(grid.methods))),
        ("regimes", str(len(grid.regimes))),
        ("seeds", str(len({row["seed"] for row in rows}))),
        ("training", f"{seconds / 60:.0f} min of one thread"),
    ]
    return facts if grid.before is None else [*facts, ("before training", f"{grid.before:.3f}")]


def _cell(grid: ComparisonTable, method: str, regime: str) -> dict[str, str]:
    score = grid.scores.get((method, regime))
    if score is None:
        return {"text": "–", "interval": "", "rank": "", "style": "", "hint": grid.refused.get((method, regime), "")}
    interval = f"[{score.accuracy.low:.3f}, {score.accuracy.high:.3f}]" if len(score.values) > 1 else ""
    rank_mark = "=" if score.is_best and score.rank > 1 else ""
    each = "  ".join(f"{seed}: {value:.3f}" for seed, value in zip(score.seeds, score.values, strict=True))
    return {
        "text": f"{score.accuracy.mean:.3f}{' †' if score.collapsed_mostly else ''}",
        "interval": interval,
        "rank": f"#{score.rank}{rank_mark}",
        "style": _shade(score.accuracy.mean, grid.before),
        "hint": f"by seed {each}" + (f"; {score.diverged} diverged" if score.diverged else ""),
    }


def _shade(value: float, before: float | None) -> str:
    """Returns a CSS background: blue above the initial accuracy, orange below, stronger with distance."""
    start = before or 0.0
    above = value >= start
    room = (1 - start) if above else start
    red, green, blue = ABOVE if above else BELOW
    return f"background: rgba({red}, {green}, {blue}, {MAX_OPACITY * abs(value - start) / max(room, 1e-9):.2f})"


def _details(grid: ComparisonTable, regime: str) -> list[dict[str, Any]]:
    scores = [(method, grid.scores[method, regime]) for method in grid.methods if (method, regime) in grid.scores]
    scores.sort(key=lambda pair: pair[1].rank)
    return [
        {"method": method, "score": cell_text(grid, method, regime), "cells": _numbers(score)}
        for method, score in scores
    ]


def _numbers(score: MethodScore) -> list[str]:
    """Returns the cells of the detail table.

    Best accuracy, reward, last and largest k3, lowest ESS, largest sequence log-ratio and gradient norm, share of
    clipped and rejected tokens (means over seeds), skipped updates (sum), and number of diverged runs.
    """

    def mean(key: str) -> float | None:
        values = [row[key] for row in score.rows if row.get(key) is not None]
        return float(np.mean(values)) if values else None

    plain = [mean(key) for key in ("accuracy_best", "reward")]
    sizes = [mean(key) for key in ("k3", "k3_worst", "ess_worst", "log_ratio_seq_worst", "grad_norm_max")]
    shares = [mean(key) for key in ("clipped", "rejected")]
    return [
        *("–" if value is None else f"{value:.3f}" for value in plain),
        *("–" if value is None else short(value) for value in sizes),
        *("–" if value is None else f"{value:.1%}" for value in shares),
        str(sum(row.get("skipped") or 0 for row in score.rows)),
        str(score.diverged),
    ]


def _figures(grid: ComparisonTable, regime: str) -> list[tuple[str, Markup]]:
    """Returns the curves of held-out accuracy: one figure for a few methods, otherwise a small one for each.

    Small figures also show the curve of the regime's best method. Not escaped: matplotlib escapes every label itself.
    """
    scores = {m: grid.scores[m, regime] for m in grid.methods if (m, regime) in grid.scores}
    curves = {method: curve for method, score in scores.items() if (curve := _curve(score)) is not None}
    if not curves:
        return []
    if len(curves) <= MAX_SHARED_FIGURE:
        return [("", _draw_svg(f"{regime}: held-out accuracy", curves, grid.before, (6.5, 3.2)))]
    best = min(curves, key=lambda method: scores[method].rank)
    return [
        (method, _draw_svg(f"{method} in {regime}", {method: curve}, grid.before, (3.0, 2.0), behind=curves[best]))
        for method, curve in curves.items()
    ]


Curve = tuple[np.ndarray, np.ndarray]  # steps (count,), accuracy (seeds, count)


def _curve(score: MethodScore) -> Curve | None:
    """Returns the accuracies at the steps all seeds were evaluated at; a run that diverged early has fewer."""
    rows = [row for row in score.rows if row["curve_steps"]]
    if not rows:
        return None
    steps = reduce(np.intersect1d, [np.array(row["curve_steps"]) for row in rows])
    values = [np.array(row["curve"])[np.isin(row["curve_steps"], steps)] for row in rows]
    return steps, np.stack(values)


def _draw_svg(
    name: str, curves: Mapping[str, Curve], before: float | None, size: tuple[float, float], behind: Curve | None = None
) -> Markup:
    with mpl.rc_context(RC):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.add_subplot()
        if behind is not None:
            axes.plot(behind[0], behind[1].mean(axis=0), color=INK, linewidth=1, linestyle=":", alpha=0.7)
        for index, (label, curve) in enumerate(curves.items()):
            is_single = len(curves) == 1
            color, style = (BLUE, "-") if is_single else (CYCLE[index], STYLES[index])
            _band(axes, curve, color, style, label)
        if before is not None:
            axes.axhline(before, color=INK, linewidth=0.5, alpha=0.5)
        axes.set_ylim(0, 1)
        finish(figure, axes)
        return Markup(to_svg(figure, name))


def _band(axes: Axes, curve: Curve, color: str, style: Any, label: str) -> None:
    steps, values = curve
    if len(values) > 1:
        axes.fill_between(steps, values.min(axis=0), values.max(axis=0), color=color, alpha=0.18, linewidth=0)
    axes.plot(steps, values.mean(axis=0), color=color, linestyle=style, linewidth=1.8, label=label)
