"""Sample, score, count."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from trimtab import rewards, tasks
from trimtab.errors import TrimtabError
from trimtab.evaluation.result import EvalResult, ProblemResult
from trimtab.rewards import Score, Scorer
from trimtab.types import Completion, Engine, Problem, RewardSpec, Sampling, Task

PROMPTS_PER_CALL = 64
ERRORS_KEPT = 5
Progress = Callable[[int, int], None]


def evaluate(
    engine: Engine,
    tokenizer: Any,
    task: Task,
    scorer: Scorer,
    *,
    problems: Sequence[Problem],
    samples: int = 1,
    sampling: Sampling,
    seed: int,
    progress: Progress | None = None,
) -> EvalResult:
    """Draw `samples` responses to every problem and score them; `temperature` 0 is greedy.

    A sample is correct when the first reward gives it its full 1. Deterministic by `seed`. `progress(done, all)` is
    called after each batch of prompts.

    Raises `TrimtabError`: no problems, several samples of a greedy decode, or not a single sample could be scored.
    """
    if not problems:
        raise TrimtabError(
            f"task {task.name!r} has no problems to evaluate on; give it a test split (holdout, test_path)"
        )
    if sampling.temperature == 0 and samples > 1:
        raise TrimtabError(
            f"samples = {samples} at temperature 0 are all the same; use 1 sample or a temperature above 0"
        )
    start = time.perf_counter()
    tally = _Tally(scorer.rewards[0].name)
    for number, first in enumerate(range(0, len(problems), PROMPTS_PER_CALL)):
        part = problems[first : first + PROMPTS_PER_CALL]
        prompts = [tasks.encode(task, problem, tokenizer) for problem in part]
        # The engine's draws depend on a prompt's place in its call: each call needs a seed of its own.
        call_seed = int(np.random.SeedSequence((seed, number)).generate_state(1)[0])
        answers = engine.generate(prompts, samples, sampling, seed=call_seed)
        pairs = [(problem, answer) for problem, group in zip(part, answers, strict=True) for answer in group]
        scores = scorer.score(pairs)
        for index, (problem, group) in enumerate(zip(part, answers, strict=True)):
            tally.add(problem, group, scores[index * samples : (index + 1) * samples])
        if progress is not None:
            progress(first + len(part), len(problems))
    return tally.result(task.name, samples, sampling.temperature, seed, time.perf_counter() - start)


class _Tally:
    """Running counts of an evaluation."""

    def __init__(self, verdict: str) -> None:
        self.verdict = verdict
        self.problems: list[ProblemResult] = []
        self.errors: list[str] = []
        self.cut = self.tokens = self.answers = 0

    def add(self, problem: Problem, answers: Sequence[Completion], scores: Sequence[Score]) -> None:
        self.answers += len(answers)
        self.cut += sum(answer.finish == "length" for answer in answers)
        self.tokens += sum(len(answer.response_ids) for answer in answers)
        self.errors += [score.error or "reward failed" for score in scores if score.total is None]
        good = [score for score in scores if score.total is not None]
        if good:
            correct = sum(score.parts[self.verdict] >= 1.0 for score in good)
            reward = sum(score.total or 0.0 for score in good) / len(good)
            self.problems.append(ProblemResult(problem.id, len(good), correct, reward))

    def result(self, task: str, samples: int, temperature: float, seed: int, seconds: float) -> EvalResult:
        if not self.problems:
            raise TrimtabError(f"task {task!r}: not one sample could be scored; the first failure: {self.errors[0]}")
        return EvalResult(
            task=task,
            samples=samples,
            temperature=temperature,
            seed=seed,
            problems=tuple(self.problems),
            failures=len(self.errors),
            errors=tuple(self.errors[:ERRORS_KEPT]),
            truncated=self.cut / self.answers,
            tokens=self.tokens / self.answers,
            seconds=seconds,
        )


def run(
    model: str,
    task: str,
    *,
    options: Mapping[str, Any] | None = None,
    reward: Sequence[RewardSpec] = (),
    problems: int | None = None,
    samples: int = 1,
    temperature: float | None = None,
    top_p: float = 1.0,
    max_tokens: int | None = None,
    seed: int = 0,
    dtype: str = "bfloat16",
    progress: Progress | None = None,
) -> EvalResult:
    """Evaluate a model (bundled name, folder or HF id) on a task's test split with the embedded engine.

    `problems` limits how many test problems are used (the first ones); `temperature` defaults to greedy for one sample
    and 1 for several; `reward` to the task's own. `dtype` is that of the engine.
    """
    built = tasks.build(task, **(options or {}))
    chosen = list(built.test if problems is None else built.test[:problems])
    sampling = Sampling(
        temperature=(0.0 if samples == 1 else 1.0) if temperature is None else temperature,
        top_p=top_p,
        max_tokens=max_tokens or built.max_tokens,
        stop=built.stop,
    )
    with rewards.build(reward, built) as scorer:  # before torch is imported: it forks
        import torch

        from trimtab.models import load as models
        from trimtab.rollout.embedded import EmbeddedEngine

        precision = {"bfloat16": torch.bfloat16, "float32": torch.float32}.get(dtype)
        if precision is None:
            raise TrimtabError(f"unknown dtype {dtype!r}: use 'bfloat16' or 'float32'")
        loaded = models.load(model, dtype=precision)
        loaded.model.to(models.default_device())  # pyright: ignore[reportArgumentType]
        engine = EmbeddedEngine(loaded.model, loaded.tokenizer, precision)
        return evaluate(
            engine,
            loaded.tokenizer,
            built,
            scorer,
            problems=chosen,
            samples=samples,
            sampling=sampling,
            seed=seed,
            progress=progress,
        )
