"""Recommends a method from an experiment, in one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trimtab.intervals import SEPARABLE_FROM, STUDENT_FROM, interval
from trimtab.report.comparison_table import Grid


@dataclass(frozen=True)
class Recommendation:
    """`method` is None where no method can be recommended; `text` says why, or why this one."""

    method: str | None
    text: str


def ordered(grid: Grid) -> list[str]:
    """Methods from the highest mean accuracy over the regimes to the lowest; those a regime refused come last."""
    return sorted(grid.methods, key=lambda method: (not _whole(grid, method), -_mean(grid, method)))


def recommend(grid: Grid) -> Recommendation:
    """The method with the highest mean accuracy, what it is ahead of, and what these seeds cannot tell from it."""
    whole = [method for method in ordered(grid) if _whole(grid, method)]
    if not whole:
        return Recommendation(None, "No recommendation: no method was trained in every regime.")
    best, mean = whole[0], _mean(grid, whole[0])
    before = "" if grid.before is None else f" ({grid.before:.3f} before)"
    where = "" if len(grid.regimes) == 1 else f", the mean over {' and '.join(grid.regimes)}"
    if any(grid.scores[best, regime].fell for regime in grid.regimes) or (grid.before or 0.0) >= mean:
        return Recommendation(
            None,
            f"No method learns at this mismatch: {best}, the best of {len(whole)}, ends at {mean:.3f} held-out "
            f"accuracy{before}{where}. Lower the mismatch first (trimtab diagnose).",
        )
    ties = [method for method in whole[1:] if _tied(grid, best, method)]
    return Recommendation(
        best, f"Recommended: {best}, with {mean:.3f} held-out accuracy{before}{where}. {_against(grid, whole, ties)}"
    )


def _against(grid: Grid, whole: Sequence[str], ties: Sequence[str]) -> str:
    if len(whole) == 1:
        return "It is the only method that was trained."
    seeds = min(len(grid.scores[whole[0], regime].values) for regime in grid.regimes)
    few = (
        f" More seeds tell more: the same command with --seeds {STUDENT_FROM} adds them."
        if seeds < STUDENT_FROM
        else ""
    )
    return _ahead(grid, whole, ties, f"{seeds} seed{'s' if seeds > 1 else ''}") + few


def _ahead(grid: Grid, whole: Sequence[str], ties: Sequence[str], counted: str) -> str:
    if len(ties) == len(whole) - 1:
        return f"{counted.capitalize()} cannot tell it from any other method."
    if ties:
        return f"{counted.capitalize()} cannot tell it from {', '.join(ties)}; the others are behind."
    lead = _mean(grid, whole[0]) - _mean(grid, whole[1])
    return f"It is ahead of all others in {counted}, of {whole[1]} by {lead:.3f}."


def _tied(grid: Grid, best: str, other: str) -> bool:
    """Whether the seeds cannot tell two methods apart in the mean over the regimes, which the recommendation is by."""
    first, second = _by_seed(grid, best), _by_seed(grid, other)
    found = interval([first[seed] - second[seed] for seed in first.keys() & second.keys()])
    return found is None or found.count < SEPARABLE_FROM or found.low <= 0


def _by_seed(grid: Grid, method: str) -> dict[int, float]:
    """Mean accuracy over the regimes, of the seeds that were trained in all of them."""
    scores = [grid.scores[method, regime] for regime in grid.regimes]
    values = [dict(zip(score.seeds, score.values, strict=True)) for score in scores]
    shared = set(values[0]).intersection(*values[1:])
    return {seed: sum(found[seed] for found in values) / len(values) for seed in sorted(shared)}


def _whole(grid: Grid, method: str) -> bool:
    return all((method, regime) in grid.scores for regime in grid.regimes)


def _mean(grid: Grid, method: str) -> float:
    found = [grid.scores[method, regime].accuracy.mean for regime in grid.regimes if (method, regime) in grid.scores]
    return sum(found) / len(found) if found else -1.0
