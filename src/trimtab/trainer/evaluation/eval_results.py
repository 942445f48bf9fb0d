"""The results of one model on one task: accuracy, pass@k and counts, with intervals over problems."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from trimtab.errors import TrimtabError
from trimtab.intervals import Interval, problem_interval
from trimtab.trainer.environments.episode import EpisodeCounts

ERRORS_SHOWN = 5


@lru_cache(maxsize=1 << 16)
def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate of P(at least one of k samples is right) from n samples of which c are (Chen et al. 2021).

    1 - C(n-c, k) / C(n, k). Raises `TrimtabError` unless 0 <= c <= n and 1 <= k <= n: for k > n it is undefined.
    """
    if not 0 <= c <= n:
        raise TrimtabError(f"pass@k: {c} correct of {n} samples is impossible")
    if not 1 <= k <= n:
        raise TrimtabError(
            f"pass@{k} needs at least {k} samples per problem and k >= 1, there are {n}; draw more samples"
        )
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


@dataclass(frozen=True)
class ProblemResult:
    """The result of one problem: number of scored samples, number of correct ones among them, and mean reward."""

    id: str
    scored: int
    correct: int
    reward: float


@dataclass(frozen=True)
class EvalResult:
    """The result of one model on one task. Accuracy is the mean over problems of correct / scored (avg@n)."""

    task: str
    samples: int
    temperature: float
    seed: int
    problems: tuple[ProblemResult, ...]  # those with at least one scored sample, and those that are too long
    errors: tuple[str, ...]  # of samples whose reward failed, failed episodes included: they are in no other number
    truncated: float  # share of samples cut by the length limit
    tokens: float  # mean number of response tokens
    seconds: float
    too_long: int  # problems whose prompt does not fit the context: all their samples count as wrong, with reward 0
    prompt: str  # its style
    episodes: EpisodeCounts | None = None  # None without an environment

    @property
    def accuracy(self) -> float:
        return self.accuracy_estimate.value

    @cached_property
    def accuracy_estimate(self) -> Interval:
        """The accuracy with its 95% confidence interval over problems drawn at random."""
        return problem_interval([problem.correct / problem.scored for problem in self.problems], self.scored)

    @property
    def scored(self) -> int:
        """Number of scored samples of all problems."""
        return sum(problem.scored for problem in self.problems)

    @property
    def reward(self) -> float:
        return sum(problem.reward for problem in self.problems) / len(self.problems)

    @property
    def pass_ks(self) -> tuple[int, ...]:
        """Powers of two up to the smallest number of scored samples; none for a single sample."""
        most = min(problem.scored for problem in self.problems)
        return tuple(1 << power for power in range(most.bit_length())) if most > 1 else ()

    @cached_property
    def pass_estimates(self) -> dict[int, Interval]:
        """pass@k with its interval for every k of `pass_ks`."""
        return {
            k: problem_interval([pass_at_k(one.scored, one.correct, k) for one in self.problems], self.scored / k)
            for k in self.pass_ks
        }

    def as_dict(self) -> dict[str, Any]:
        """Returns everything as JSON types."""
        accuracy, low, high = self.accuracy_estimate
        passes = self.pass_estimates.items()
        return {
            "task": self.task,
            "accuracy": accuracy,
            "accuracy_low": low,
            "accuracy_high": high,
            "problems": len(self.problems),
            "samples": self.samples,
            "temperature": self.temperature,
            "seed": self.seed,
            "prompt": self.prompt,
            "too_long": self.too_long,
            "pass": {str(k): estimate.value for k, estimate in passes},
            "pass_low": {str(k): estimate.low for k, estimate in passes},
            "pass_high": {str(k): estimate.high for k, estimate in passes},
            "reward": self.reward,
            "failures": len(self.errors),
            "errors": list(self.errors[:ERRORS_SHOWN]),
            "truncated": self.truncated,
            "tokens": self.tokens,
            "episodes": None if self.episodes is None else self.episodes.as_dict(),
            "seconds": self.seconds,
            "counts": [[problem.id, problem.correct, problem.scored] for problem in self.problems],
        }
