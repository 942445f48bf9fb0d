"""What an evaluation found, as numbers, JSON, Markdown or a terminal table."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from trimtab.errors import TrimtabError
from trimtab.evaluation.passk import bootstrap, pass_at_k


@dataclass(frozen=True)
class ProblemResult:
    """One problem: how many samples were scored, how many of them are right, their mean reward."""

    id: str
    scored: int
    correct: int
    reward: float


@dataclass(frozen=True)
class EvalResult:
    """Accuracy is the mean over problems of correct / scored (avg@n). Samples whose reward failed are counted in
    `failures` and in nothing else; `problems` lists those with at least one scored sample.
    """

    task: str
    samples: int
    temperature: float
    seed: int
    problems: tuple[ProblemResult, ...]
    failures: int
    errors: tuple[str, ...]
    truncated: float
    tokens: float
    seconds: float

    @cached_property
    def accuracy(self) -> float:
        return sum(problem.correct / problem.scored for problem in self.problems) / len(self.problems)

    @cached_property
    def interval(self) -> tuple[float, float]:
        """95% bootstrap interval of the accuracy over problems."""
        return bootstrap([problem.correct / problem.scored for problem in self.problems], seed=self.seed)

    @property
    def reward(self) -> float:
        return sum(problem.reward for problem in self.problems) / len(self.problems)

    def pass_at(self, k: int) -> float:
        """Mean over problems of the unbiased pass@k. Raises `TrimtabError` if a problem has fewer scored samples."""
        short = next((problem for problem in self.problems if problem.scored < k), None)
        if short is not None:
            raise TrimtabError(
                f"pass@{k}: problem {short.id!r} has {short.scored} scored samples; draw more, or mend the reward"
            )
        return sum(pass_at_k(problem.scored, problem.correct, k) for problem in self.problems) / len(self.problems)

    @property
    def pass_ks(self) -> tuple[int, ...]:
        """Powers of two up to the smallest number of scored samples; none for a single sample."""
        most = min(problem.scored for problem in self.problems)
        return tuple(1 << power for power in range(most.bit_length())) if most > 1 else ()

    def as_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        low, high = self.interval
        return {
            "task": self.task,
            "accuracy": self.accuracy,
            "accuracy_low": low,
            "accuracy_high": high,
            "problems": len(self.problems),
            "samples": self.samples,
            "temperature": self.temperature,
            "seed": self.seed,
            "pass": {str(k): self.pass_at(k) for k in self.pass_ks},
            "reward": self.reward,
            "failures": self.failures,
            "errors": list(self.errors),
            "truncated": self.truncated,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "counts": [[problem.id, problem.correct, problem.scored] for problem in self.problems],
        }

    def rows(self) -> list[tuple[str, str]]:
        """What a reader wants to see first, as (name, value) text."""
        low, high = self.interval
        kind = "greedy accuracy" if self.temperature == 0 else f"accuracy (avg@{self.samples})"
        lines = [
            ("task", self.task),
            (kind, f"{self.accuracy:.3f}  [{low:.3f}, {high:.3f}]"),
            *((f"pass@{k}", f"{self.pass_at(k):.3f}") for k in self.pass_ks if k > 1),
            ("problems x samples", f"{len(self.problems)} x {self.samples}"),
            ("temperature", f"{self.temperature:g}"),
            ("mean reward", f"{self.reward:.3f}"),
            ("mean tokens", f"{self.tokens:.1f}"),
            ("cut by the length limit", f"{self.truncated:.1%}"),
            ("failed rewards", str(self.failures)),
            ("seconds", f"{self.seconds:.1f}"),
        ]
        return lines + [("first failure", error) for error in self.errors[:1]]

    def markdown(self) -> str:
        body = "\n".join(f"| {name} | {value.replace('|', chr(92) + '|')} |" for name, value in self.rows())
        return f"| measure | value |\n|---|---|\n{body}\n"

    def table(self) -> Any:
        """A `rich.table.Table` for the terminal."""
        from rich.table import Table
        from rich.text import Text

        table = Table(show_header=False, box=None, padding=(0, 2))
        for name, value in self.rows():
            table.add_row(Text(name, style="dim"), Text(value))
        return table
