"""Evaluation without a trainer: avg@n, pass@k and relay sampling on tasks."""

from trimtab.trainer.evaluation.eval_result import EvalResult, ProblemResult, pass_at_k
from trimtab.trainer.evaluation.eval_tables import Results
from trimtab.trainer.evaluation.evaluator import evaluate
from trimtab.trainer.evaluation.settings import ModelSpec, Settings, TaskSpec
from trimtab.trainer.evaluation.suite import compare, run

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
