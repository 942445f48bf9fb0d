"""The held-out problems of a run, and the share of them its policy solves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from trimtab import tasks
from trimtab.evaluation import evaluate
from trimtab.training.collect import Collector
from trimtab.training.seeds import derive
from trimtab.types import Engine, Problem


@dataclass(frozen=True)
class HeldOut:
    """The first `eval.problems` of the test split. Those whose prompts are too long are not asked and not solved."""

    asked: Sequence[Problem]
    too_long: int

    @classmethod
    def of(cls, collector: Collector) -> HeldOut:
        stream = collector.stream
        problems = stream.task.test[: collector.config.eval.problems]
        asked = [problem for problem in problems if stream.fits(tasks.encode(stream.task, problem, stream.tokenizer))]
        return cls(asked, len(problems) - len(asked))

    def lines(self) -> list[str]:
        total = len(self.asked) + self.too_long
        if not self.too_long:
            return []
        return [f"{self.too_long:,} of {total:,} held-out problems have longer prompts: they count as not solved"]

    def measure(self, engine: Engine, collector: Collector) -> tuple[float, int]:
        """Greedy accuracy, and the number of problems it is the mean of. Raises `TrimtabError` if there is none."""
        if self.too_long and not self.asked:
            return 0.0, self.too_long
        result = evaluate(
            engine,
            collector.stream.tokenizer,
            collector.stream.task,
            collector.scorer,
            problems=self.asked,
            sampling=replace(collector.sampling, temperature=0.0, top_p=1.0, top_k=0),
            seed=derive(collector.config.seed, "eval"),
        )
        scored = len(result.problems)
        total = scored + self.too_long
        return result.accuracy * scored / total, total
