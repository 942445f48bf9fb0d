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


def eval_metrics(task: str, samples: int) -> list[str]:
    """Returns the metric keys of a task's accuracies: greedy, and avg@n if there are samples."""
    return [f"eval/{task}/greedy", *([f"eval/{task}/avg@{samples}"] if samples else [])]


@dataclass(frozen=True)
class HeldOut:
    """The held-out problems of one task, which are evaluated during training.

    `without_long` leaves out a problem whose prompt and the task's longest response do not fit the context together. It
    counts as not solved, as in `trimtab eval`. `sampling.max_prompt_tokens` has no effect here.
    """

    task: Task
    scorer: Scorer
    problems: Sequence[Problem]
    samples: int  # responses to each problem for avg@n; 0: greedy only
    too_long: int = 0  # number of problems that were left out
    episodes: EpisodeRunner | None = None  # runs responses of several turns

    @property
    def metrics(self) -> list[str]:
        """The metric keys of the task's accuracies."""
        return eval_metrics(self.task.name, self.samples)

    def without_long(self, collector: Collector) -> HeldOut:
        if collector.context is None:
            return self
        max_prompt = collector.context - _task_sampling(collector, self.task, greedy=True).max_tokens
        lengths = [len(tasks.encode(self.task, item, collector.stream.tokenizer).ids) for item in self.problems]
        fitting = [item for item, length in zip(self.problems, lengths, strict=True) if length <= max_prompt]
        return replace(self, problems=fitting, too_long=len(self.problems) - len(fitting))

    def lines(self) -> list[str]:
        """Returns messages for the user."""
        if not self.too_long:
            return []
        return [
            f"{self.too_long:,} of {len(self.problems) + self.too_long:,} held-out problems of "
            f"{self.task.name} do not fit the context with their response: they count as not solved"
        ]

    def measure(self, engine: Engine, collector: Collector) -> dict[str, float]:
        """Returns the accuracies by metric, and the number of problems. Raises `TrimtabError` if there are none."""
        greedy, *sampled = self.metrics
        result = {greedy: self._accuracy(engine, collector, samples=1, greedy=True)}
        for name in sampled:
            result[name] = self._accuracy(engine, collector, samples=self.samples, greedy=False)
        return {**result, f"eval/{self.task.name}/problems": float(len(self.problems) + self.too_long)}

    def _accuracy(self, engine: Engine, collector: Collector, *, samples: int, greedy: bool) -> float:
        if self.too_long and not self.problems:
            return 0.0
        result = evaluate(
            engine,
            collector.stream.tokenizer,
            self.task,
            self.scorer,
            problems=self.problems,
            samples=samples,
            sampling=_task_sampling(collector, self.task, greedy=greedy),
            seed=derive(collector.config.seed, "eval"),
            episodes=self.episodes,
        )
        scored = len(result.problems)
        return result.accuracy * scored / (scored + self.too_long)


def _task_sampling(collector: Collector, task: Task, *, greedy: bool) -> SamplingParams:
    """Returns the run's sampling, greedy or as in training, with the task's stop strings and length limit."""
    own = replace(collector.sampling, top_logprobs=0)
    if task is not collector.stream.task:
        own = replace(own, stop=task.stop, max_tokens=task.max_tokens)
    return replace(own, temperature=0.0, top_p=1.0, top_k=0) if greedy else own


def build_held_out(config: Config, task: Task, scorer: Scorer, others: Sequence[Task]) -> list[HeldOut]:
    """Returns the problems of the run's task and of those of `[[eval.task]]`, each with scorer processes of its own."""
    section = config.eval
    built = [HeldOut(task, scorer, task.test[section.skip : section.skip + section.problems], section.samples)]
    for other, entry in zip(others, section.task, strict=True):
        problems = other.test[: entry.problems or section.problems]
        built.append(HeldOut(other, rewards.build([], other), problems, entry.samples))
    return built
