"""Accuracy on held-out problems during training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from trimtab import tasks
from trimtab.evaluation import evaluate
from trimtab.rollout.collector import Collector
from trimtab.seeds import derive
from trimtab.types import Engine, Problem


@dataclass(frozen=True)
class HeldOut:
    """The first `eval.problems` of the test split.

    A problem whose prompt and longest response do not fit the context together is not sampled (it is not in `problems`)
    and counts as not solved, as in `trimtab eval`. `sampling.max_prompt_tokens` has no effect here.
    """

    problems: Sequence[Problem]
    too_long: int

    @classmethod
    def of(cls, collector: Collector) -> HeldOut:
        task, tokenizer, room = collector.stream.task, collector.stream.tokenizer, collector.max_prompt
        problems = task.test[: collector.config.eval.problems]
        fitting = [item for item in problems if room is None or len(tasks.encode(task, item, tokenizer).ids) <= room]
        return cls(fitting, len(problems) - len(fitting))

    def lines(self) -> list[str]:
        """Messages for the user."""
        total = len(self.problems) + self.too_long
        if not self.too_long:
            return []
        return [f"{self.too_long:,} of {total:,} held-out problems do not fit the context: they count as not solved"]

    def measure(self, engine: Engine, collector: Collector) -> tuple[float, int]:
        """Returns the greedy accuracy and the number of problems. Raises `TrimtabError` if there are none."""
        if self.too_long and not self.problems:
            return 0.0, self.too_long
        result = evaluate(
            engine,
            collector.stream.tokenizer,
            collector.stream.task,
            collector.scorer,
            problems=self.problems,
            sampling=replace(collector.sampling, temperature=0.0, top_p=1.0, top_k=0),
            seed=derive(collector.config.seed, "eval"),
            episodes=collector.episodes,
        )
        scored = len(result.problems)
        total = scored + self.too_long
        return result.accuracy * scored / total, total
