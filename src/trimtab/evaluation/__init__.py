"""Evaluation without a trainer: avg@n, pass@k and relay sampling on tasks."""

from trimtab.evaluation.evaluate import evaluate
from trimtab.evaluation.passk import Estimate, pass_at_k
from trimtab.evaluation.result import EvalResult, ProblemResult
from trimtab.evaluation.settings import ModelSpec, Settings, TaskSpec
from trimtab.evaluation.suite import Watch, compare, run
from trimtab.evaluation.table import Results

__all__ = [
    "Estimate",
    "EvalResult",
    "ModelSpec",
    "ProblemResult",
    "Results",
    "Settings",
    "TaskSpec",
    "Watch",
    "compare",
    "evaluate",
    "pass_at_k",
    "run",
]
