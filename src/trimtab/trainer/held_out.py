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
    """What is evaluated during training: a task, its scorer, the number of problems, and samples to each (0: none)."""

    task: Task
    scorer: Scorer
    problems: int
    samples: int
    skip: int = 0  # problems of the test split that are left out before them
    episodes: EpisodeRunner | None = None  # runs responses of several turns

    @property
    def metrics(self) -> list[str]:
        """The keys of its accuracies."""
        return eval_metrics(self.task.name, self.samples)


def eval_metrics(task: str, samples: int) -> list[str]:
    """Returns the keys of the accuracies of a task: greedy, and avg@n with samples."""
    return [f"eval/{task}/greedy", *([f"eval/{task}/avg@{samples}"] if samples else [])]


@dataclass(frozen=True)
class HeldOut:
    """Problems of the test split of one task: the first ones, behind those that are skipped.

    A problem whose prompt and longest response (of this task) do not fit the context together is not sampled (it is not
    in `problems`) and counts as not solved, as in `trimtab eval`. `sampling.max_prompt_tokens` has no effect here.
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
        """Messages for the user."""
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
    """Returns the run's own sampling, greedy or as in training, with the stops and the length of the task."""
    own = replace(collector.sampling, top_logprobs=0)
    if task is not collector.stream.task:
        own = replace(own, stop=task.stop, max_tokens=task.max_tokens)
    return replace(own, temperature=0.0, top_p=1.0, top_k=0) if greedy else own


def eval_tasks(config: Config, task: Task, scorer: Scorer, others: Sequence[Task]) -> list[EvalTask]:
    """Returns the run's own task and those of `[[eval.task]]`, whose scorers start separate processes."""
    section = config.eval
    evaluated = [EvalTask(task, scorer, section.problems, section.samples, section.skip)]
    for built, other in zip(others, section.task, strict=True):
        count = other.problems or section.problems
        evaluated.append(EvalTask(built, rewards.build([], built), count, other.samples))
    return evaluated
