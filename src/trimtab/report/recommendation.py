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


def ordered(grid: ComparisonTable) -> list[str]:
    """Returns the methods by mean accuracy over the regimes, highest first; those not trained in every regime last."""
    return sorted(grid.methods, key=lambda method: (not _is_complete(grid, method), -_mean(grid, method)))


def recommend(grid: ComparisonTable) -> Recommendation:
    """Recommends the method with the highest mean accuracy, and names those the seeds cannot distinguish from it."""
    complete = [method for method in ordered(grid) if _is_complete(grid, method)]
    if not complete:
        return Recommendation(None, "No recommendation: no method was trained in every regime.")
    best, mean = complete[0], _mean(grid, complete[0])
    before = "" if grid.before is None else f" ({grid.before:.3f} before)"
    where = "" if len(grid.regimes) == 1 else f", the mean over {' and '.join(grid.regimes)}"
    if any(grid.scores[best, regime].collapsed_mostly for regime in grid.regimes) or (grid.before or 0.0) >= mean:
        return Recommendation(
            None,
            f"No method learns at this mismatch: {best}, the best of {len(complete)}, ends at {mean:.3f} held-out "
            f"accuracy{before}{where}. Lower the mismatch first (trimtab diagnose).",
        )
    ties = [method for method in complete[1:] if _indistinguishable(grid, best, method)]
    return Recommendation(
        best,
        f"Recommended: {best}, with {mean:.3f} held-out accuracy{before}{where}. {_margin_text(grid, complete, ties)}",
    )


def _margin_text(grid: ComparisonTable, complete: Sequence[str], ties: Sequence[str]) -> str:
    if len(complete) == 1:
        return "It is the only method that was trained."
    seeds = min(len(grid.scores[complete[0], regime].values) for regime in grid.regimes)
    advice = (
        f" More seeds tell more: the same command with --seeds {STUDENT_FROM} adds them."
        if seeds < STUDENT_FROM
        else ""
    )
    return _lead_text(grid, complete, ties, f"{seeds} seed{'s' if seeds > 1 else ''}") + advice


def _lead_text(grid: ComparisonTable, complete: Sequence[str], ties: Sequence[str], counted: str) -> str:
    if len(ties) == len(complete) - 1:
        return f"{counted.capitalize()} cannot tell it from any other method."
    if ties:
        return f"{counted.capitalize()} cannot tell it from {', '.join(ties)}; the others are behind."
    lead = _mean(grid, complete[0]) - _mean(grid, complete[1])
    return f"It is ahead of all others in {counted}, of {complete[1]} by {lead:.3f}."


def _indistinguishable(grid: ComparisonTable, best: str, other: str) -> bool:
    """Whether the seeds cannot distinguish two methods by their mean accuracy over the regimes."""
    first, second = _by_seed(grid, best), _by_seed(grid, other)
    difference = seed_interval([first[seed] - second[seed] for seed in first.keys() & second.keys()])
    return difference is None or difference.count < SEPARABLE_FROM or difference.low <= 0


def _by_seed(grid: ComparisonTable, method: str) -> dict[int, float]:
    """Returns the mean accuracy over the regimes by seed, for the seeds that were trained in all of them."""
    scores = [grid.scores[method, regime] for regime in grid.regimes]
    values = [dict(zip(score.seeds, score.values, strict=True)) for score in scores]
    shared = set(values[0]).intersection(*values[1:])
    return {seed: sum(by_regime[seed] for by_regime in values) / len(values) for seed in sorted(shared)}


def _is_complete(grid: ComparisonTable, method: str) -> bool:
    return all((method, regime) in grid.scores for regime in grid.regimes)


def _mean(grid: ComparisonTable, method: str) -> float:
    means = [grid.scores[method, regime].accuracy.mean for regime in grid.regimes if (method, regime) in grid.scores]
    return sum(means) / len(means) if means else -1.0
