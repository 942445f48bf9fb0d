"""Evaluation without a trainer: avg@n and pass@k on tasks.

`suite` measures models on tasks, `evaluator` one model on one task, which training does too; `eval_results` has the
numbers of one model on one task, and the tables of several.
"""

from trimtab.trainer.evaluation.eval_results import EvalResult, Results, pass_at_k
from trimtab.trainer.evaluation.evaluator import evaluate
from trimtab.trainer.evaluation.suite import ModelSpec, Settings, TaskSpec, compare

__all__ = ["EvalResult", "ModelSpec", "Results", "Settings", "TaskSpec", "compare", "evaluate", "pass_at_k"]
