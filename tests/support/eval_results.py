"""Results of evaluations from counts."""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.trainer.evaluation.eval_results import BatchCounts, EvalResult, ProblemResult


def result(counts: Sequence[tuple[int, int]], seed: int = 0, task: str = "t") -> EvalResult:
    """An evaluation with these (correct, scored) counts."""
    problems = tuple(ProblemResult(f"p{i}", n, c, c / n) for i, (c, n) in enumerate(counts))
    part = BatchCounts(problems, sum(n for _, n in counts), 0, 0, 0, (), 0.0)
    most = max(n for _, n in counts)
    return EvalResult.of([part], task=task, samples=most, temperature=1.0, seed=seed, prompt="plain")
