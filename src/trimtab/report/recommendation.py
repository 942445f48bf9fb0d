"""Recommends a method from the results of an experiment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trimtab.intervals import SEPARABLE_FROM, STUDENT_FROM, seed_interval
from trimtab.report.comparison_table import ComparisonTable


@dataclass(frozen=True)
class Recommendation:
    """The recommended method and the reason; `method` is None if none can be recommended."""

    method: str | None
    text: str


def by_accuracy(table: ComparisonTable) -> list[str]:
    """Returns the methods by mean accuracy over the regimes, highest first; those not trained in every regime last."""
    return sorted(table.methods, key=lambda method: (not _is_complete(table, method), -_mean(table, method)))


def recommend(table: ComparisonTable) -> Recommendation:
    """Recommends the method with the highest mean accuracy, and names those the seeds cannot distinguish from it."""
    complete = [method for method in by_accuracy(table) if _is_complete(table, method)]
    if not complete:
        return Recommendation(None, "No recommendation: no method was trained in every regime.")
    best, mean = complete[0], _mean(table, complete[0])
    before = "" if table.before is None else f" ({table.before:.3f} before)"
    where = "" if len(table.regimes) == 1 else f", the mean over {' and '.join(table.regimes)}"
    if any(table.scores[best, regime].collapsed_mostly for regime in table.regimes) or (table.before or 0.0) >= mean:
        return Recommendation(
            None,
            f"No method learns at this mismatch: {best}, the best of {len(complete)}, ends at {mean:.3f} held-out "
            f"accuracy{before}{where}. Lower the mismatch first (trimtab diagnose).",
        )
    ties = [method for method in complete[1:] if _indistinguishable(table, best, method)]
    return Recommendation(
        best,
        f"Recommended: {best}, with {mean:.3f} held-out accuracy{before}{where}. {_margin_text(table, complete, ties)}",
    )


def _margin_text(table: ComparisonTable, complete: Sequence[str], ties: Sequence[str]) -> str:
    if len(complete) == 1:
        return "It is the only method that was trained."
    seeds = min(len(table.scores[complete[0], regime].values) for regime in table.regimes)
    advice = (
        f" More seeds tell more: the same command with --seeds {STUDENT_FROM} adds them."
        if seeds < STUDENT_FROM
        else ""
    )
    return _lead_text(table, complete, ties, f"{seeds} seed{'s' if seeds > 1 else ''}") + advice


def _lead_text(table: ComparisonTable, complete: Sequence[str], ties: Sequence[str], counted: str) -> str:
    if len(ties) == len(complete) - 1:
        return f"{counted.capitalize()} cannot tell it from any other method."
    if ties:
        return f"{counted.capitalize()} cannot tell it from {', '.join(ties)}; the others are behind."
    lead = _mean(table, complete[0]) - _mean(table, complete[1])
    return f"It is ahead of all others in {counted}, of {complete[1]} by {lead:.3f}."


def _indistinguishable(table: ComparisonTable, best: str, other: str) -> bool:
    """Whether the seeds cannot distinguish two methods by their mean accuracy over the regimes."""
    first, second = _by_seed(table, best), _by_seed(table, other)
    difference = seed_interval([first[seed] - second[seed] for seed in first.keys() & second.keys()])
    return difference is None or difference.count < SEPARABLE_FROM or difference.low <= 0


def _by_seed(table: ComparisonTable, method: str) -> dict[int, float]:
    """Returns the mean accuracy over the regimes by seed, for the seeds that were trained in all of them."""
    scores = [table.scores[method, regime] for regime in table.regimes]
    values = [dict(zip(score.seeds, score.values, strict=True)) for score in scores]
    shared = set(values[0]).intersection(*values[1:])
    return {seed: sum(by_regime[seed] for by_regime in values) / len(values) for seed in sorted(shared)}


def _is_complete(table: ComparisonTable, method: str) -> bool:
    return all((method, regime) in table.scores for regime in table.regimes)


def _mean(table: ComparisonTable, method: str) -> float:
    means = [table.scores[method, regime].accuracy.mean for regime in table.regimes if (method, regime) in table.scores]
    return sum(means) / len(means) if means else -1.0
