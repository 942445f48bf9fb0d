"""Evaluation without a trainer: avg@n, pass@k and relay sampling on tasks."""

from trimtab.evaluation.eval_result import EvalResult, ProblemResult, pass_at_k
from trimtab.evaluation.eval_tables import Results
from trimtab.evaluation.evaluator import evaluate
from trimtab.evaluation.settings import ModelSpec, Settings, TaskSpec
from trimtab.evaluation.suite import compare, run

__all__ = [
    "EvalResult",
    "ModelSpec",
    "ProblemResult",
    "Results",
    "Settings",
    "TaskSpec",
    "compare",
    "evaluate",
    "pass_at_k",
    "run",
]
