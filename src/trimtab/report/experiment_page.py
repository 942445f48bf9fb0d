"""The page of an experiment: a shaded table of methods x regimes, accuracy curves, and mismatch metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from trimtab.pages.numbers import short
from trimtab.pages.page import Cell, Charts, Fold, Note, Page, Part, Section, Table
from trimtab.report.comparison_figures import MAX_SHARED_FIGURE, accuracy_figures, legend_of
from trimtab.report.comparison_table import ComparisonTable, MethodScore, cell_text, legend
from trimtab.runs.atomic import write_output

ABOVE, BELOW = (0, 114, 178), (213, 94, 0)
MAX_OPACITY = 0.5  # opacity of the strongest shade at which text is readable in both themes
CURVES = (
    "Held-out accuracy over steps: mean of the seeds, and the range from the lowest to the highest; of up to three "
    "seeds each has a thin line. The level line is the accuracy before training."
)
DETAILS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("best", "accuracy_best", "{:.3f}".format),
    ("reward, last tenth", "reward", "{:.3f}".format),
    ("k3, end", "k3", short),
    ("k3, worst", "k3_worst", short),
    ("ESS, lowest", "ess_worst", short),
    ("sequence |log-ratio|, worst", "log_ratio_seq_worst", short),
    ("gradient norm, worst", "grad_norm_max", short),
    ("clipped", "clipped", "{:.1%}".format),
    ("rejected", "rejected", "{:.1%}".format),
)
"""Title, key and format of the columns of a regime's table, each a mean over seeds."""


def write_experiment_page(table: ComparisonTable, path: Path, *, notes: Sequence[str] = ()) -> Path:
    """Writes the page and returns `path`. `notes` are sentences shown above the table."""
    page = Page(
        kind="Trimtab laboratory",
        title="Methods under controlled mismatch",
        description=notes,
        facts=_facts(table),
        sections=[
            Section("Held-out accuracy after training", _scores(table)),
            *(Section(regime, _regime(table, regime)) for regime in table.regimes),
        ],
    )
    return write_output(path, page.html().encode())


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


def _scores(table: ComparisonTable) -> list[Part]:
    rows = [[method, *(_cell(table, method, regime) for regime in table.regimes)] for method in table.methods]
    failed = [f"{row['regime']}, {row['method']}, seed {row['seed']}: {row['error']}" for row in table.failed]
    return [
        Table(("method", *table.regimes), rows, mono=(0,)),
        Note(f"{legend(table)} Blue is above the start, orange below it."),
        *(Note(text, name) for name, text in table.regimes.items() if text),
        *(
            Note(f"{regime}, {method}: {why}", "not trained", "plain")
            for (method, regime), why in table.refused.items()
        ),
        *(Note(text, "failed, not in the table", "warn") for text in failed),
    ]


def _cell(table: ComparisonTable, method: str, regime: str) -> Cell:
    score = table.scores.get((method, regime))
    if score is None:
        return Cell("–", hint=table.refused.get((method, regime), ""))
    each = "  ".join(f"{seed}: {value:.3f}" for seed, value in zip(score.seeds, score.values, strict=True))
    return Cell(
        f"{score.accuracy.mean:.3f} {score.rank_text}{' †' if score.collapsed_mostly else ''}",
        note=score.interval_text,
        shade=_shade(score.accuracy.mean, table.before),
        hint=f"by seed {each}" + (f"; {score.diverged} diverged" if score.diverged else ""),
    )


def _shade(value: float, before: float | None) -> str:
    """Returns a CSS color: blue above the initial accuracy, orange below, stronger with distance."""
    start = before or 0.0
    above = value >= start
    largest = (1 - start) if above else start
    red, green, blue = ABOVE if above else BELOW
    return f"rgba({red}, {green}, {blue}, {MAX_OPACITY * abs(value - start) / max(largest, 1e-9):.2f})"


def _regime(table: ComparisonTable, regime: str) -> list[Part]:
    """Returns the curves of held-out accuracy in a regime and the table of its methods, best first."""
    scores = {method: table.scores[method, regime] for method in table.methods if (method, regime) in table.scores}
    curves = {
        method: [(np.array(row["curve_steps"]), np.array(row["curve"])) for row in score.rows if row["curve_steps"]]
        for method, score in scores.items()
    }
    curves = {method: seeds for method, seeds in curves.items() if seeds}
    best = min(curves, key=lambda method: scores[method].rank, default="")
    shared = len(curves) <= MAX_SHARED_FIGURE
    ranked = sorted(scores.items(), key=lambda pair: pair[1].rank)
    details = Table(
        ("method", "accuracy", *(title for title, *_ in DETAILS), "skipped updates", "diverged"),
        [[method, cell_text(table, method, regime), *_numbers(score)] for method, score in ranked],
        numeric=range(1, len(DETAILS) + 4),
        mono=(0,),
    )
    figures: list[Part] = [
        *([legend_of([(method, "") for method in curves])] if shared else []),
        Charts(accuracy_figures(regime, curves, best, table.before), narrow=not shared),
        Note(CURVES if shared else f"{CURVES} Dotted is the best method of the regime."),
    ]
    return [*(figures if curves else []), Fold("Mismatch and training, means over seeds", [details])]


def _numbers(score: MethodScore) -> list[str]:
    """Returns the cells of `DETAILS`, skipped updates (sum over seeds), and number of diverged runs."""
    cells = []
    for _, key, form in DETAILS:
        values = [row[key] for row in score.rows if row.get(key) is not None]
        cells.append(form(float(np.mean(values))) if values else "–")
    return [*cells, str(sum(row.get("skipped") or 0 for row in score.rows)), str(score.diverged)]
