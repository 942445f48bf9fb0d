"""Accuracy on held-out problems during training: greedy, and the mean of several samples (avg@n)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from trimtab.trainer import rewards, tasks
from trimtab.trainer.config import Config
from trimtab.trainer.environments.episodes import EpisodeRunner
from trimtab.trainer.evaluation import evaluate
from trimtab.trainer.rewards import Scorer
from trimtab.trainer.rollout.collector import Collector
from trimtab.trainer.seeds import derive
from trimtab.types import Engine, Problem, SamplingParams, Task


@dataclass(frozen=True)
class EvalTask:
    """A task that is evaluated during training."""

    task: Task
    scorer: Scorer
    problems: int  # how many are evaluated
    samples: int  # responses to each problem for avg@n; 0: greedy only
    skip: int = 0  # problems at the start of the test split that are left out
    episodes: EpisodeRunner | None = None  # runs responses of several turns

    @property
    def metrics(self) -> list[str]:
        """The metric keys of the task's accuracies."""
        return eval_metrics(self.task.name, self.samples)


def eval_metrics(task: str, samples: int) -> list[str]:
    """Returns the metric keys of a task's accuracies: greedy, and avg@n if there are samples."""
    return [f"eval/{task}/greedy", *([f"eval/{task}/avg@{samples}"] if samples else [])]


@dataclass(frozen=True)
class HeldOut:
    """The held-out problems of one task: the first of its test split, after the skipped ones.

    A problem is not in `problems` if its prompt and the task's longest response do not fit the context together. It
    counts as not solved, as in `trimtab eval`. `sampling.max_prompt_tokens` has no effect here.
    """

    evaluated: EvalTask
    problems: Sequence[Problem]
    too_long: int

    @classmethod
    def build(cls, evaluated: EvalTask, collector: Collector) -> HeldOut:
        task, tokenizer, context = evaluated.task, collector.stream.tokenizer, collector.context
        problems = task.test[evaluated.skip : evaluated.skip + evaluated.problems]
        if context is None:
            return cls(evaluated, problems, 0)
        max_prompt = context - _task_sampling(collector, task, greedy=True).max_tokens
        fitting = [item for item in problems if len(tasks.encode(task, item, tokenizer).ids) <= max_prompt]
        return cls(evaluated, fitting, len(problems) - len(fitting))

    def lines(self) -> list[str]:
        """Returns messages for the user."""
        if not self.too_long:
            return []
        return [
            f"{self.too_long:,} of {len(self.problems) + self.too_long:,} held-out problems of "
            f"{self.evaluated.task.name} do not fit the context with their response: they count as not solved"
        ]

    def measure(self, engine: Engine, collector: Collector) -> dict[str, float]:
        """Returns the accuracies by metric, and the number of problems. Raises `TrimtabError` if there are none."""
        greedy, *sampled = self.evaluated.metrics
        result = {greedy: self._accuracy(engine, collector, samples=1, greedy=True)}
        for name in sampled:
            result[name] = self._accuracy(engine, collector, samples=self.evaluated.samples, greedy=False)
        return {**result, f"eval/{self.evaluated.task.name}/problems": float(len(self.problems) + self.too_long)}

    def _accuracy(self, engine: Engine, collector: Collector, *, samples: int, greedy: bool) -> float:
        if self.too_long and not self.problems:
            return 0.0
        result = evaluate(
            engine,
            collector.stream.tokenizer,
            self.evaluated.task,
            self.evaluated.scorer,
            problems=self.problems,
            samples=samples,
            sampling=_task_sampling(collector, self.evaluated.task, greedy=greedy),
            seed=derive(collector.config.seed, "eval"),
            episodes=self.evaluated.episodes,
        )
        scored = len(result.problems)
        return result.accuracy * scored / (scored + self.too_long)


def _task_sampling(collector: Collector, task: Task, *, greedy: bool) -> SamplingParams:
    """Returns the run's sampling, greedy or as in training, with the task's stop strings and length limit."""
    own = replace(collector.sampling, top_logprobs=0)
    if task is not collector.stream.task:
        own = replace(own, stop=task.stop, max_tokens=task.max_tokens)
    return replace(own, temperature=0.0, top_p=1.0, top_k=0) if greedy else own


def eval_tasks(config: Config, task: Task, scorer: Scorer, others: Sequence[Task]) -> list[EvalTask]:
    """Returns the run's own task and the tasks of `[[eval.task]]`; each of these starts its own scorer processes."""
    section = config.eval
    evaluated = [EvalTask(task, scorer, section.problems, section.samples, section.skip)]
    for built, other in zip(others, section.task, strict=True):
        count = other.problems or section.problems
        evaluated.append(EvalTask(built, rewards.build([], built), count, other.samples))
    return evaluated
