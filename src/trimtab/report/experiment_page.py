"""The page of an experiment: a shaded table of methods x regimes, accuracy curves, and mismatch metrics."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.pages.render import render, short
from trimtab.report.comparison_figures import MAX_SHARED_FIGURE, accuracy_figures, swatch
from trimtab.report.comparison_table import ComparisonTable, MethodScore, cell_text, legend
from trimtab.report.curves import Series
from trimtab.runs.atomic import write_output

TITLE = "Methods under controlled mismatch"
ABOVE, BELOW = (0, 114, 178), (213, 94, 0)
MAX_OPACITY = 0.5  # opacity of the strongest shade at which text is readable in both themes


def write_experiment_page(
    table: ComparisonTable,
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
    scores = {
        "legend": legend(table),
        "regimes": [{"name": name, "description": text} for name, text in table.regimes.items()],
        "rows": [
            {"method": method, "cells": [_cell(table, method, regime) for regime in table.regimes]}
            for method in methods or table.methods
        ],
        "details": [
            {"regime": regime, **_curves(table, regime), "rows": _details(table, regime)} for regime in table.regimes
        ],
        "refused": [f"{regime}, {method}: {reason}" for (method, regime), reason in table.refused.items()],
        "failed": [f"{row['regime']}, {row['method']}, seed {row['seed']}: {row['error']}" for row in table.failed],
    }
    values = {
        "over": "Trimtab laboratory",
        "title": title,
        "notes": list(notes),
        "facts": _facts(table),
        "verdict": verdict,
        "cautions": [],
        "scores": scores,
        "runs": None,
    }
    return write_output(path, render("comparison.html.j2", values).encode())


def _facts(table: ComparisonTable) -> list[tuple[str, str]]:
    rows = [row for score in table.scores.values() for row in score.rows]
    seconds = sum(row.get("seconds") or 0.0 for row in rows)
    facts = [
        ("runs", str(len(rows))),
        ("methods", str(len(table.methods))),
        ("regimes", str(len(table.regimes))),
        ("seeds", str(len({row["seed"] for row in rows}))),
        ("training", f"{seconds / 60:.0f} min of one thread"),
    ]
    return facts if table.before is None else [*facts, ("before training", f"{table.before:.3f}")]


def _cell(table: ComparisonTable, method: str, regime: str) -> dict[str, str]:
    score = table.scores.get((method, regime))
    if score is None:
        return {"text": "–", "interval": "", "rank": "", "style": "", "hint": table.refused.get((method, regime), "")}
    each = "  ".join(f"{seed}: {value:.3f}" for seed, value in zip(score.seeds, score.values, strict=True))
    return {
        "text": f"{score.accuracy.mean:.3f}{' †' if score.collapsed_mostly else ''}",
        "interval": score.interval_text,
        "rank": score.rank_text,
        "style": _shade(score.accuracy.mean, table.before),
        "hint": f"by seed {each}" + (f"; {score.diverged} diverged" if score.diverged else ""),
    }


def _shade(value: float, before: float | None) -> str:
    """Returns a CSS background: blue above the initial accuracy, orange below, stronger with distance."""
    start = before or 0.0
    above = value >= start
    largest = (1 - start) if above else start
    red, green, blue = ABOVE if above else BELOW
    return f"background: rgba({red}, {green}, {blue}, {MAX_OPACITY * abs(value - start) / max(largest, 1e-9):.2f})"


def _curves(table: ComparisonTable, regime: str) -> dict[str, Any]:
    """Returns the figures of held-out accuracy in a regime and, where methods share one, its legend."""
    scores = {method: table.scores[method, regime] for method in table.methods if (method, regime) in table.scores}
    curves = {method: seeds for method, score in scores.items() if (seeds := _series(score))}
    best = min(curves, key=lambda method: scores[method].rank, default="")
    shared = len(curves) <= MAX_SHARED_FIGURE
    return {
        "figures": accuracy_figures(regime, curves, best, table.before),
        "swatches": [(swatch(index), method) for index, method in enumerate(curves)] if shared else [],
    }


def _series(score: MethodScore) -> list[Series]:
    """Returns steps and accuracies of every seed that was evaluated."""
    return [(np.array(row["curve_steps"]), np.array(row["curve"])) for row in score.rows if row["curve_steps"]]


def _details(table: ComparisonTable, regime: str) -> list[dict[str, Any]]:
    scores = [(method, table.scores[method, regime]) for method in table.methods if (method, regime) in table.scores]
    scores.sort(key=lambda pair: pair[1].rank)
    return [
        {"method": method, "score": cell_text(table, method, regime), "cells": _numbers(score)}
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

    measures = [mean(key) for key in ("accuracy_best", "reward")]
    sizes = [mean(key) for key in ("k3", "k3_worst", "ess_worst", "log_ratio_seq_worst", "grad_norm_max")]
    shares = [mean(key) for key in ("clipped", "rejected")]
    return [
        *("–" if value is None else f"{value:.3f}" for value in measures),
        *("–" if value is None else short(value) for value in sizes),
        *("–" if value is None else f"{value:.1%}" for value in shares),
        str(sum(row.get("skipped") or 0 for row in score.rows)),
        str(score.diverged),
    ]
