"""Results of an evaluation: accuracy, pass@k and counts of one model on one task, and tables of several results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import Any

from trimtab.errors import TrimtabError
from trimtab.intervals import Interval, macro_average, problem_interval
from trimtab.trainer.environments.episode import EpisodeCounts

ERRORS_SHOWN = 5
AVERAGE = "average"
NOTE = "percent, with 95% intervals over problems"


@lru_cache(maxsize=1 << 16)
def pass_at_k(n: int, c: int, k: int) -> float:
    """Returns the unbiased estimate of P(at least one of k samples is correct), from c correct ones of n samples.

    1 - C(n-c, k) / C(n, k) (Chen et al. 2021), undefined for k > n. Raises `TrimtabError` unless 0 <= c <= n and
    1 <= k <= n.
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
    """The result of one problem: number of scored samples, number of correct samples, and mean reward."""

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
    problems: tuple[ProblemResult, ...]  # problems with a scored sample, and problems whose prompt is too long
    errors: tuple[str, ...]  # of samples whose reward or episode failed; accuracy, pass@k and reward exclude them
    truncated: float  # share of samples cut by the length limit
    tokens: float  # mean number of response tokens
    seconds: float
    too_long: int  # problems whose prompt does not fit the context: all their samples count as wrong, with reward 0
    prompt: str  # the style of the prompts
    episodes: EpisodeCounts | None = None  # None if there is no environment

    @property
    def accuracy(self) -> float:
        return self.accuracy_estimate.value

    @cached_property
    def accuracy_estimate(self) -> Interval:
        """The accuracy with its 95% confidence interval, for problems drawn at random."""
        return problem_interval([problem.correct / problem.scored for problem in self.problems], self.scored)

    @property
    def scored(self) -> int:
        return sum(problem.scored for problem in self.problems)

    @property
    def reward(self) -> float:
        return sum(problem.reward for problem in self.problems) / len(self.problems)

    @property
    def pass_ks(self) -> tuple[int, ...]:
        """All k: powers of two up to the smallest number of scored samples; empty for a single sample."""
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
        """Returns the fields, and the numbers that follow from them, as JSON types."""
        accuracy, low, high = self.accuracy_estimate
        passes = self.pass_estimates.items()
        return {
            **{item.name: getattr(self, item.name) for item in fields(self)},
            "accuracy": accuracy,
            "accuracy_low": low,
            "accuracy_high": high,
            "problems": len(self.problems),
            "pass": {str(k): estimate.value for k, estimate in passes},
            "pass_low": {str(k): estimate.low for k, estimate in passes},
            "pass_high": {str(k): estimate.high for k, estimate in passes},
            "reward": self.reward,
            "failures": len(self.errors),
            "errors": list(self.errors[:ERRORS_SHOWN]),
            "episodes": None if self.episodes is None else self.episodes.as_dict(),
            "counts": [[problem.id, problem.correct, problem.scored] for problem in self.problems],
        }


@dataclass(frozen=True)
class TextTable:
    """A table of text with a title; the first `labels` columns name the row, the others hold numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    labels: int = 1


@dataclass(frozen=True)
class Results:
    """Results of several models and tasks. Averages weight all tasks equally (macro mean)."""

    models: tuple[str, ...]
    tasks: tuple[str, ...]
    settings: Mapping[str, Any]
    measured: Mapping[tuple[str, str, str], EvalResult]  # by (model, task, mode); the mode is "greedy" or "sampled"
    notes: tuple[str, ...] = ()  # on the tasks, such as the choice of a prompt style

    @property
    def modes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(mode for _, _, mode in self.measured))

    @cached_property
    def ks(self) -> tuple[int, ...]:
        """All k for which every sampled result has a pass@k."""
        sampled = [result.pass_ks for (_, _, mode), result in self.measured.items() if mode != "greedy"]
        return min(sampled, key=len, default=())

    def accuracy(self, model: str, mode: str, tasks: Sequence[str] | None = None) -> Interval:
        """Returns the mean of avg@n over `tasks` (default: all)."""
        return macro_average([self.measured[model, task, mode].accuracy_estimate for task in tasks or self.tasks])

    def passes(self, model: str, mode: str, tasks: Sequence[str] | None = None) -> dict[int, Interval]:
        """Returns the mean of pass@k over `tasks` (default: all) for each k in `ks`."""
        by_task = [self.measured[model, task, mode].pass_estimates for task in tasks or self.tasks]
        return {k: macro_average([estimates[k] for estimates in by_task]) for k in self.ks}

    def tables(self) -> list[TextTable]:
        """Returns the tables of accuracies, of pass@k if it was measured, and of details."""
        passes = [self._passes()] if self.ks else []
        return [self._accuracies(), *passes, self._details()]

    def remarks(self) -> list[str]:
        """Returns notes on the tables: how prompts were built, prompts that do not fit, failed rewards and calls."""
        long = [
            f"{model}, {task}: {result.too_long} of {len(result.problems)} prompts do not fit the context with their "
            "response and count as wrong; lower max_tokens or examples"
            for (model, task, _), result in self.measured.items()
            if result.too_long
        ]
        failed = [f"first failed reward: {result.errors[0]}" for result in self.measured.values() if result.errors]
        calls = [result.episodes.message() for result in self.measured.values() if result.episodes is not None]
        return list(dict.fromkeys([*self.notes, *long, *failed, *filter(None, calls)]))

    def as_dict(self) -> dict[str, Any]:
        """Returns all results as JSON types; accuracies are fractions, not percentages."""
        averages = [
            (model, mode, self.accuracy(model, mode), {} if mode == "greedy" else self.passes(model, mode))
            for model in self.models
            for mode in self.modes
        ]
        return {
            "settings": dict(self.settings),
            "notes": self.remarks(),
            "results": [
                {"model": model, "mode": mode, **result.as_dict()} for (model, _, mode), result in self.measured.items()
            ],
            "average": [
                {
                    "model": model,
                    "mode": mode,
                    "accuracy": accuracy.value,
                    "accuracy_low": accuracy.low,
                    "accuracy_high": accuracy.high,
                    "pass": {str(k): estimate._asdict() for k, estimate in passes.items()},
                }
                for model, mode, accuracy, passes in averages
            ],
        }

    def _columns(self) -> list[tuple[str, Sequence[str]]]:
        """Returns the columns of the tables with their tasks: each task, and the average if there are several tasks."""
        single: list[tuple[str, Sequence[str]]] = [(task, (task,)) for task in self.tasks]
        return single if len(single) == 1 else [*single, (AVERAGE, self.tasks)]

    def _accuracies(self) -> TextTable:
        modes = [mode for mode in ("sampled", "greedy") if mode in self.modes]
        cells = [(name, tasks, mode) for name, tasks in self._columns() for mode in modes]
        titles = {"greedy": "greedy", "sampled": f"avg@{self.settings['samples']}"}
        columns = ["model", *(f"{name} {titles[mode]}" for name, _, mode in cells)]
        rows = [
            [model, *(_format_percent(self.accuracy(model, mode, tasks)) for _, tasks, mode in cells)]
            for model in self.models
        ]
        return TextTable(f"Accuracy ({NOTE})", columns, rows)

    def _passes(self) -> TextTable:
        rows = []
        for model in self.models:
            columns = [self.passes(model, "sampled", tasks) for _, tasks in self._columns()]
            rows += [[model, str(k), *(_format_percent(column[k]) for column in columns)] for k in self.ks]
        return TextTable(f"pass@k ({NOTE})", ["model", "k", *(name for name, _ in self._columns())], rows, labels=2)

    def _details(self) -> TextTable:
        names = ["model", "task", "mode", "prompt", "problems", "samples", "temperature", "mean reward", "mean tokens"]
        titles = list(EpisodeCounts().columns()) if any(r.episodes is not None for r in self.measured.values()) else []
        rows = []
        for (model, task, mode), result in self.measured.items():
            episode = {} if result.episodes is None else result.episodes.columns()
            row = [model, task, mode, result.prompt]
            row += [str(len(result.problems)), str(result.samples), f"{result.temperature:g}"]
            row += [f"{result.reward:.3f}", f"{result.tokens:.1f}"]
            row += [f"{result.truncated:.1%}", *(episode.get(title, "-") for title in titles)]
            rows.append([*row, str(len(result.errors)), f"{result.seconds:.1f}"])
        return TextTable("Details", [*names, "cut by the limit", *titles, "failed rewards", "seconds"], rows, labels=4)


def _format_percent(estimate: Interval) -> str:
    """Returns a percentage with its interval, such as `37.9 [33.1, 42.6]`."""
    value, low, high = (format(100 * number, ".1f") for number in estimate)
    return f"{value} [{low}, {high}]"
