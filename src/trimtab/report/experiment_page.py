"""The page of an experiment: methods x regimes as a shaded table, curves with bands, and the mismatch."""

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

from trimtab.pages.render import render, short, write
from trimtab.pages.svg import BLUE, CYCLE, INK, RC, STYLES, finish, to_svg
from trimtab.report.comparison_table import Grid, Score, legend, words

TITLE = "Methods under controlled mismatch"
# Curves of more methods than these colors get a panel each.
TOGETHER = len(CYCLE)
ABOVE, BELOW = (0, 114, 178), (213, 94, 0)
DEEPEST = 0.5  # opacity of the strongest shade; text stays readable on it in both themes


def write_grid(
    grid: Grid,
    path: Path,
    *,
    title: str = TITLE,
    notes: Sequence[str] = (),
    methods: Sequence[str] | None = None,
    verdict: str = "",
) -> Path:
    """Write the page; `notes` are sentences shown above the table, `verdict` the one above all. `methods`: their order
    in the table."""
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
    return write(path, render("grid.html.j2", values).encode())


def _facts(grid: Grid) -> list[tuple[str, str]]:
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


def _cell(grid: Grid, method: str, regime: str) -> dict[str, str]:
    score = grid.scores.get((method, regime))
    if score is None:
        return {"text": "–", "interval": "", "rank": "", "style": "", "hint": grid.refused.get((method, regime), "")}
    interval = f"[{score.accuracy.low:.3f}, {score.accuracy.high:.3f}]" if len(score.values) > 1 else ""
    tied = "=" if score.tied and score.rank > 1 else ""
    each = "  ".join(f"{seed}: {value:.3f}" for seed, value in zip(score.seeds, score.values, strict=True))
    return {
        "text": f"{score.accuracy.mean:.3f}{' †' if score.fell else ''}",
        "interval": interval,
        "rank": f"#{score.rank}{tied}",
        "style": _shade(score.accuracy.mean, grid.before),
        "hint": f"by seed {each}" + (f"; {score.diverged} diverged" if score.diverged else ""),
    }


def _shade(value: float, before: float | None) -> str:
    """Blue above the start, orange below it, deeper the further away."""
    start = before or 0.0
    above = value >= start
    room = (1 - start) if above else start
    red, green, blue = ABOVE if above else BELOW
    return f"background: rgba({red}, {green}, {blue}, {DEEPEST * abs(value - start) / max(room, 1e-9):.2f})"


def _details(grid: Grid, regime: str) -> list[dict[str, Any]]:
    found = [(method, grid.scores[method, regime]) for method in grid.methods if (method, regime) in grid.scores]
    found.sort(key=lambda pair: pair[1].rank)
    return [
        {"method": method, "score": words(grid, method, regime), "cells": _numbers(score)} for method, score in found
    ]


def _numbers(score: Score) -> list[str]:
    """Best accuracy, reward, k3 at the end and worst, lowest ESS, largest sequence ratio and gradient norm, shares."""

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


def _figures(grid: Grid, regime: str) -> list[tuple[str, Markup]]:
    """Curves of held-out accuracy: in one figure for a few methods, otherwise a small one for each with the regime's
    best behind it. Not escaped: matplotlib made them and escapes every label itself."""
    found = {m: grid.scores[m, regime] for m in grid.methods if (m, regime) in grid.scores}
    curves = {method: curve for method, score in found.items() if (curve := _curve(score)) is not None}
    if not curves:
        return []
    if len(curves) <= TOGETHER:
        return [("", _drawn(f"{regime}: held-out accuracy", curves, grid.before, (6.5, 3.2)))]
    best = min(curves, key=lambda method: found[method].rank)
    return [
        (method, _drawn(f"{method} in {regime}", {method: curve}, grid.before, (3.0, 2.0), behind=curves[best]))
        for method, curve in curves.items()
    ]


Curve = tuple[np.ndarray, np.ndarray]  # steps (count,), accuracy (seeds, count)


def _curve(score: Score) -> Curve | None:
    """The steps that all seeds were evaluated at; a run that diverged early shortens them."""
    rows = [row for row in score.rows if row["curve_steps"]]
    if not rows:
        return None
    steps = reduce(np.intersect1d, [np.array(row["curve_steps"]) for row in rows])
    values = [np.array(row["curve"])[np.isin(row["curve_steps"], steps)] for row in rows]
    return steps, np.stack(values)


def _drawn(
    name: str, curves: Mapping[str, Curve], before: float | None, size: tuple[float, float], behind: Curve | None = None
) -> Markup:
    with mpl.rc_context(RC):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.add_subplot()
        if behind is not None:
            axes.plot(behind[0], behind[1].mean(axis=0), color=INK, linewidth=1, linestyle=":", alpha=0.7)
        for index, (label, curve) in enumerate(curves.items()):
            alone = len(curves) == 1
            color, style = (BLUE, "-") if alone else (CYCLE[index], STYLES[index])
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
