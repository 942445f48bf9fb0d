"""The accuracy on held-out problems during training."""

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

    Those whose prompts do not fit the context beside a whole response are not asked and count as not solved, as in
    `trimtab eval`. `sampling.max_prompt_tokens` concerns training alone.
    """

    asked: Sequence[Problem]
    too_long: int

    @classmethod
    def of(cls, collector: Collector) -> HeldOut:
        task, tokenizer, room = collector.stream.task, collector.stream.tokenizer, collector.room
        problems = task.test[: collector.config.eval.problems]
        asked = [item for item in problems if room is None or len(tasks.encode(task, item, tokenizer).ids) <= room]
        return cls(asked, len(problems) - len(asked))

    def lines(self) -> list[str]:
        total = len(self.asked) + self.too_long
        if not self.too_long:
            return []
        return [f"{self.too_long:,} of {total:,} held-out problems do not fit the context: they count as not solved"]

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
