"""Evaluates one model on one task: samples responses, scores them and counts correct ones."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trimtab.errors import TrimtabError
from trimtab.trainer import tasks
from trimtab.trainer.environments.episode import EpisodeCounts
from trimtab.trainer.environments.episodes import EpisodeRunner, reset_seed
from trimtab.trainer.evaluation.eval_results import EvalResult, ProblemResult
from trimtab.trainer.rewards import Scorer
from trimtab.types import Completion, Engine, Problem, Prompt, SamplingParams, Task

# Largest number of prompts, and approximately of responses, in one engine call.
PROMPTS_PER_CALL = 64
RESPONSES_PER_CALL = 1024


def evaluate(
    engine: Engine,
    tokenizer: Any,
    task: Task,
    scorer: Scorer,
    *,
    problems: Sequence[Problem],
    samples: int = 1,
    sampling: SamplingParams,
    seed: int,
    progress: Callable[[int, int], None] | None = None,
    context: int | None = None,
    episodes: EpisodeRunner | None = None,
) -> EvalResult:
    """Samples `samples` responses to every problem and scores them; a `temperature` of 0 is greedy.

    A sample is correct if its first reward is 1. The result is a function of `seed`. `progress(done, all)` is called
    after each batch of problems. `episodes` runs multi-turn responses.

    `context` is the context length of the models in tokens. A problem whose prompt does not fit it together with
    `sampling.max_tokens` is not sampled, and all its samples count as wrong. Without `context` the engine refuses it.

    Raises `TrimtabError` if there are no problems, if no prompt fits, or if no sample could be scored.
    """
    require_problems(task, problems)
    prompts = [tasks.encode(task, problem, tokenizer) for problem in problems]
    max_prompt = sys.maxsize if context is None else context - sampling.max_tokens
    shortest = min(len(prompt.ids) for prompt in prompts)
    if shortest > max_prompt:
        raise TrimtabError(
            f"task {task.name!r}: no prompt fits, the shortest of {len(prompts)} has {shortest} tokens, max_tokens is "
            f"{sampling.max_tokens} and the model's context holds {context}; lower max_tokens or examples, or take "
            "another model"
        )
    size = max(1, min(PROMPTS_PER_CALL, RESPONSES_PER_CALL // samples))
    counts, start = _Counts(), time.perf_counter()
    for number, first in enumerate(range(0, len(problems), size)):
        batch = prompts[first : first + size]
        fitting = {i: prompt for i, prompt in enumerate(batch, start=first) if len(prompt.ids) <= max_prompt}
        sampled = _sample(engine, fitting, samples, sampling, (seed, number), episodes)
        answers = dict(zip(fitting, sampled, strict=True))
        counts.add(batch, [answers.get(i) for i in range(first, first + len(batch))], samples, scorer)
        if progress is not None:
            progress(first + len(batch), len(problems))
    if not counts.problems:
        raise TrimtabError(f"task {task.name!r}: not one sample could be scored; the first failure: {counts.errors[0]}")
    return EvalResult(
        task=task.name,
        samples=samples,
        temperature=sampling.temperature,
        seed=seed,
        problems=tuple(counts.problems),
        errors=tuple(counts.errors),
        truncated=counts.cut / counts.answers,
        tokens=counts.tokens / counts.answers,
        seconds=time.perf_counter() - start,
        too_long=counts.too_long,
        prompt=task.prompt_style,
        episodes=counts.episodes if counts.episodes.episodes else None,
    )


def require_problems(task: Task, problems: Sequence[Problem]) -> None:
    if not problems:
        raise TrimtabError(
            f"task {task.name!r} has no problems to evaluate on; give it a test split (holdout, test_path)"
        )


def _sample(
    engine: Engine,
    numbered: Mapping[int, Prompt],
    samples: int,
    sampling: SamplingParams,
    seeds: tuple[int, int],
    episodes: EpisodeRunner | None,
) -> list[list[Completion]]:
    """Returns the responses to prompts.

    `numbered` has the prompts by their position in the evaluation; `seeds` are that of the evaluation and the call's.

    The engine's random draws depend on a prompt's index in the call, so each call needs its own seed.
    """
    prompts = list(numbered.values())
    if not prompts:
        return []
    if episodes is not None:
        # Not the run's own seed: training and evaluation must not play the same random environments.
        base = _seed(seeds[0])
        reset_seeds = [reset_seed(base, position) for position in numbered]
        return episodes.generate(
            engine.generate, prompts, samples, sampling, seed=_seed(*seeds), reset_seeds=reset_seeds
        )
    return engine.generate(prompts, samples, sampling, seed=_seed(*seeds))


def _seed(*words: int) -> int:
    return int(np.random.SeedSequence(words).generate_state(1)[0])


@dataclass
class _Counts:
    """Counts over batches; samples themselves are not kept. `cut`: samples that ended at the length limit."""

    problems: list[ProblemResult] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    answers: int = 0
    cut: int = 0
    tokens: int = 0
    too_long: int = 0
    episodes: EpisodeCounts = field(default_factory=EpisodeCounts)

    def add(
        self, prompts: Sequence[Prompt], groups: Sequence[Sequence[Completion] | None], samples: int, scorer: Scorer
    ) -> None:
        """Scores a batch; an entry of `groups` is None for a prompt that does not fit."""
        pairs = [(prompt.problem, one) for prompt, group in zip(prompts, groups, strict=True) for one in group or ()]
        scores = scorer.score(pairs)
        rest = iter(scores)
        for prompt, group in zip(prompts, groups, strict=True):
            if group is None:
                self.problems.append(ProblemResult(prompt.problem.id, samples, 0, 0.0))
            elif scored := [score for score in itertools.islice(rest, samples) if score.total is not None]:
                correct = sum(next(iter(score.parts.values())) >= 1.0 for score in scored)
                reward = sum(score.total or 0.0 for score in scored) / len(scored)
                self.problems.append(ProblemResult(prompt.problem.id, len(scored), correct, reward))
        self.errors += [score.error or "reward failed" for score in scores if score.total is None]
        self.answers += len(pairs)
        self.cut += sum(answer.finish_reason == "length" for _, answer in pairs)
        self.tokens += sum(answer.sampled_tokens for _, answer in pairs)
        self.too_long += sum(group is None for group in groups)
        self.episodes += EpisodeCounts.of([answer.outcome for _, answer in pairs if answer.outcome is not None])
