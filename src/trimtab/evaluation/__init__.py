"""How good a model is: avg@n and pass@k on a task, without a trainer."""

from trimtab.evaluation.evaluate import evaluate, run
from trimtab.evaluation.passk import bootstrap, pass_at_k
from trimtab.evaluation.result import EvalResult, ProblemResult

__all__ = ["EvalResult", "ProblemResult", "bootstrap", "evaluate", "pass_at_k", "run"]
