"""Results of evaluations from counts."""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.trainer.evaluation.eval_results import EvalResult, ProblemResult


def result(counts: Sequence[tuple[int, int]]) -> EvalResult:
    """An evaluation with these (correct, scored) counts."""
    problems = tuple(ProblemResult(f"p{i}", n, c, c / n) for i, (c, n) in enumerate(counts))
    samples = max(n for _, n in counts)
    return EvalResult("t", samples, 1.0, 0, problems, (), 0.0, 0.0, 0.0, 0, "plain")
