"""Evaluation without a trainer: avg@n and pass@k on tasks.

`evaluator` measures models on tasks; `eval_results` has the result of one model on one task, and tables of results.
"""

from trimtab.trainer.evaluation.eval_results import EvalResult, Results, pass_at_k
from trimtab.trainer.evaluation.evaluator import ModelSpec, Settings, TaskSpec, compare, evaluate

__all__ = ["EvalResult", "ModelSpec", "Results", "Settings", "TaskSpec", "compare", "evaluate", "pass_at_k"]
