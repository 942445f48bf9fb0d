"""The results of an experiment (methods x regimes x seeds): means, intervals and ranks, as Markdown and as a page."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from trimtab.intervals import (
    PAIRED_FROM,
    UNBOUNDED,
    SeedMean,
    detectable_lead,
    interval_method,
    may_be_best,
    seed_interval,
)
from trimtab.pages.charts import BLUE, INK, RC, VERMILLION
from trimtab.pages.page import Cell, Note, Page, Part, Section, Table
from trimtab.runs.atomic import write_output
from trimtab.text import code_span, markdown_text

COLLAPSED = 0.5  # a run has collapsed if it ends below this share of its initial accuracy
MOST_OPAQUE = 50  # percent: the strongest shade at which text is readable in both themes
# Text is drawn as outlines because a reader may lack the font; the salt makes equal figures byte-identical.
_SETTINGS: dict[Any, Any] = {
    **RC,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "svg.fonttype": "path",
    "svg.hashsalt": "trimtab",
}
_METADATA: dict[str, dict[str, Any]] = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}


@dataclass(frozen=True, eq=False)
class MethodScore:
    """The result of one method in one regime."""

    seeds: tuple[int, ...]
    values: tuple[float, ...]  # the accuracy of each seed
    accuracy: SeedMean  # held-out greedy accuracy after training, mean over seeds; a diverged run counts as 0
    rank: int  # 1 for the highest mean accuracy in the regime
    behind: SeedMean  # accuracy of the method of rank 1 minus the accuracy of this method, paired by seed
    is_best: bool  # may be the best, by t tests corrected for the number of methods (`intervals.contenders`)
    detectable: float  # the lead over this method that these seeds would have shown with a probability of 80%
    collapsed: int  # number of runs that ended below half of their initial accuracy, including diverged runs
    diverged: int
    rows: tuple[Mapping[str, Any], ...] = field(repr=False)

    @property
    def interval_text(self) -> str:
        """The interval of the accuracy, such as `[0.836, 0.867]`; empty for a single seed."""
        return f"[{self.accuracy.low:.3f}, {self.accuracy.high:.3f}]" if len(self.values) > 1 else ""

    @property
    def rank_text(self) -> str:
        """The rank, such as `#1`; with `=` for another method that may be the best, and `†` if most runs collapsed."""
        tie = "=" if self.is_best and self.rank > 1 else ""
        return f"#{self.rank}{tie}{' †' if 2 * self.collapsed > len(self.values) else ''}"


@dataclass(frozen=True, eq=False)
class ComparisonTable:
    """The results of an experiment."""

    methods: tuple[str, ...]
    regimes: Mapping[str, str]  # the description of each regime, by name
    scores: Mapping[tuple[str, str], MethodScore]  # by (method, regime)
    refused: Mapping[tuple[str, str], str]  # why a pair was not trained, by (method, regime)
    failed: tuple[Mapping[str, Any], ...]  # rows of runs that ended with an error
    before: float | None  # mean accuracy before training


def rank_methods(rows: Sequence[Mapping[str, Any]]) -> ComparisonTable:
    """Returns the table of `rows`; methods and regimes are in the order in which they first appear."""
    methods = tuple(dict.fromkeys(row["method"] for row in rows))
    regimes = {row["regime"]: row.get("regime_description") or "" for row in rows}
    refused = {(row["method"], row["regime"]): row["error"] for row in rows if row["status"] == "refused"}
    failed = tuple(row for row in rows if row["status"] == "failed")
    ended = [row for row in rows if row["status"] in ("done", "diverged")]
    scores: dict[tuple[str, str], MethodScore] = {}
    for regime in regimes:
        here = sorted((row for row in ended if row["regime"] == regime), key=lambda row: row["seed"])
        groups = {method: [row for row in here if row["method"] == method] for method in methods}
        scores |= {(m, regime): score for m, score in _scores({m: g for m, g in groups.items() if g}).items()}
    starts = [row["accuracy_before"] for row in ended if row["accuracy_before"] is not None]
    return ComparisonTable(methods, regimes, scores, refused, failed, float(np.mean(starts)) if starts else None)


def _scores(groups: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, MethodScore]:
    values = {method: {row["seed"]: _value(row) for row in rows} for method, rows in groups.items()}
    means = {method: float(np.mean(list(by_seed.values()))) for method, by_seed in values.items()}
    best = max(means, key=lambda method: means[method], default="")
    stays = dict(zip(values, may_be_best(list(values.values())), strict=True))
    return {
        method: MethodScore(
            seeds=tuple(values[method]),
            values=tuple(values[method].values()),
            accuracy=_interval(list(values[method].values()), (0.0, 1.0)),
            rank=1 + sum(other > means[method] for other in means.values()),
            behind=_interval(_leads(values[best], values[method])),
            is_best=stays[method],
            detectable=detectable_lead(_leads(values[best], values[method]), len(groups)),
            collapsed=sum(_value(row) < COLLAPSED * (row["accuracy_before"] or 0.0) for row in rows),
            diverged=sum(row["status"] == "diverged" for row in rows),
            rows=tuple(rows),
        )
        for method, rows in groups.items()
    }


def _value(row: Mapping[str, Any]) -> float:
    return 0.0 if row["accuracy"] is None else float(row["accuracy"])


def _leads(first: Mapping[int, float], other: Mapping[int, float]) -> list[float]:
    """Returns `first` - `other` for each shared seed: runs with equal seeds see the same prompts in the same order."""
    return [first[seed] - other[seed] for seed in first if seed in other]


def _interval(values: Sequence[float], limits: tuple[float, float] = UNBOUNDED) -> SeedMean:
    return seed_interval(values, limits) or SeedMean(math.nan, -math.inf, math.inf, 0)


def format_markdown(table: ComparisonTable) -> str:
    """Returns a Markdown table, methods x regimes: mean [interval], rank, and `†` if most runs collapsed."""
    head = ["method", *map(markdown_text, table.regimes)]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for method in table.methods:
        cells = [format_cell(table, method, regime) for regime in table.regimes]
        lines.append(f"| {' | '.join([code_span(method, in_table=True), *cells])} |")
    return "\n".join(lines)


def format_cell(table: ComparisonTable, method: str, regime: str) -> str:
    """Returns one cell, such as `0.854 [0.836, 0.867] #1`, or a dash if the pair was not trained."""
    score = table.scores.get((method, regime))
    if score is None:
        return "–"
    return " ".join(filter(None, [f"{score.accuracy.mean:.3f}", score.interval_text, score.rank_text]))


def describe_marks(table: ComparisonTable) -> str:
    counts = sorted({len(score.values) for score in table.scores.values()} - {1})
    rules = " or ".join(f"[{interval_method(count)}]" for count in counts)
    return (
        f"Held-out greedy accuracy after training: mean over seeds{f' {rules}' if rules else ''}, #rank in the regime; "
        "=: as good as the best by differences paired by seed: the best method is among them with 95%, although the "
        f"same seeds chose the first; fewer than {PAIRED_FROM} seeds tell nothing. "
        f"†: most runs ended below half of where they started. A diverged run counts as 0.{_power_text(table)}"
    )


def _power_text(table: ComparisonTable) -> str:
    """Returns a sentence on the leads that these seeds can detect; empty if there are too few seeds."""
    texts = []
    for regime in table.regimes:
        others = [score for (_, name), score in table.scores.items() if name == regime and score.rank > 1]
        known = sorted(score.detectable for score in others if len(score.values) >= PAIRED_FROM)
        if known:
            texts.append(f"{regime} {known[len(known) // 2]:.3f} (from {known[0]:.3f} to {known[-1]:.3f})")
    return f" A lead of the first that would have been seen with 80%: {', '.join(texts)}." if texts else ""


def draw_accuracy(table: ComparisonTable) -> Figure:
    """Returns a figure of the accuracy of every method in every regime: a dot for each seed, a bar at the mean.

    The dotted line is the accuracy before training. A method that was not trained in a regime has no dots there.
    """
    methods = table.methods
    size = (3.1 * len(table.regimes) + 2.0, 0.3 * len(methods) + 1.2)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(1, max(1, len(table.regimes)), sharey=True, squeeze=False)[0]
    for axes, regime in zip(panels, table.regimes, strict=False):
        here = [(place, (method, regime)) for place, method in enumerate(methods)]
        scores = {place: table.scores[pair] for place, pair in here if pair in table.scores}
        before = [row["accuracy_before"] for score in scores.values() for row in score.rows]
        if known := [value for value in before if value is not None]:
            axes.axvline(float(np.mean(known)), color=INK, linewidth=1, linestyle=":")
        for place, score in scores.items():
            values = list(score.values)
            axes.plot(values, [place] * len(values), "o", color=BLUE, alpha=0.35, markersize=4, markeredgewidth=0)
            axes.plot(score.accuracy.mean, place, "|", color=VERMILLION, markersize=13, markeredgewidth=2)
        axes.set_title(regime, fontsize=10, loc="left")
        axes.set_xlim(-0.02, 1.02)
        axes.set_xlabel("held-out accuracy")
        axes.grid(visible=False, axis="x")
    panels[0].set_yticks(range(len(methods)), methods)
    panels[0].set_ylim(len(methods) - 0.5, -0.5)
    return figure


def write_accuracy_figure(table: ComparisonTable, path: Path) -> list[Path]:
    """Writes `draw_accuracy` to `path` with the suffixes .png (160 dots per inch) and .svg; returns both paths."""
    written = []
    with mpl.rc_context(_SETTINGS), warnings.catch_warnings():
        # Characters of a name that the font lacks are drawn as boxes.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure = draw_accuracy(table)
        for kind, metadata in _METADATA.items():
            buffer = io.BytesIO()
            figure.savefig(buffer, format=kind, dpi=160, metadata=metadata)
            written.append(write_output(path.with_suffix(f".{kind}"), buffer.getvalue()))
    return written


def write_experiment_page(table: ComparisonTable, path: Path, *, notes: Sequence[str] = ()) -> Path:
    """Writes the page and returns `path`. `notes` are sentences shown above the table."""
    page = Page(
        kind="Trimtab laboratory",
        title="Methods under controlled mismatch",
        description=notes,
        facts=_facts(table),
        sections=[Section("Held-out accuracy after training", _score_parts(table))],
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


def _score_parts(table: ComparisonTable) -> list[Part]:
    rows = [[method, *(_cell(table, method, regime) for regime in table.regimes)] for method in table.methods]
    failed = [f"{row['regime']}, {row['method']}, seed {row['seed']}: {row['error']}" for row in table.failed]
    refused = [f"{regime}, {method}: {why}" for (method, regime), why in table.refused.items()]
    return [
        Table(("method", *table.regimes), rows, mono=(0,)),
        Note(f"{describe_marks(table)} Blue is above the start, orange below it."),
        Note("Curves, mismatch and settings of one regime: trimtab report REGIME, in the folder of this page."),
        *(Note(text, name) for name, text in table.regimes.items() if text),
        *(Note(text, "not trained", "plain") for text in refused),
        *(Note(text, "failed, not in the table", "warn") for text in failed),
    ]


def _cell(table: ComparisonTable, method: str, regime: str) -> Cell:
    score = table.scores.get((method, regime))
    if score is None:
        return Cell("–", hint=table.refused.get((method, regime), ""))
    each = "  ".join(f"{seed}: {value:.3f}" for seed, value in zip(score.seeds, score.values, strict=True))
    return Cell(
        f"{score.accuracy.mean:.3f} {score.rank_text}",
        note=score.interval_text,
        shade=_shade(score.accuracy.mean, table.before),
        hint=f"by seed {each}" + (f"; {score.diverged} diverged" if score.diverged else ""),
    )


def _shade(value: float, before: float | None) -> str:
    """Returns a CSS color: blue above the initial accuracy, orange below it, more opaque with the difference."""
    start = before or 0.0
    color, largest = ("blue", 1 - start) if value >= start else ("vermillion", start)
    return (
        f"color-mix(in srgb, var(--{color}) {MOST_OPAQUE * abs(value - start) / max(largest, 1e-9):.0f}%, transparent)"
    )
