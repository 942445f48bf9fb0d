"""Evaluates one model on one task: sample, score, count."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from trimtab import tasks
from trimtab.errors import TrimtabError
from trimtab.evaluation.eval_result import ERRORS_KEPT, EvalResult, Part, ProblemResult
from trimtab.rewards import Score, Scorer
from trimtab.rollout.truncation import portion
from trimtab.types import Completion, Engine, Problem, Prompt, Sampling, Task, cut

# One call to the engine holds at most this many prompts and about this many responses: what a kill may cost.
PROMPTS_PER_CALL = 64
RESPONSES_PER_CALL = 1024
Progress = Callable[[int, int], None]


class Memory(Protocol):
    """Parts of an interrupted evaluation with the same settings, and the place for further ones."""

    def get(self, number: int) -> Part | None: ...

    def append(self, number: int, part: Part) -> None: ...


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
    relay: Relay | None = None,
    memory: Memory | None = None,
    context: int | None = None,
) -> EvalResult:
    """Draw `samples` responses to every problem and score them; `temperature` 0 is greedy.

    A sample is correct when the first reward gives it its full 1. Deterministic by `seed`, with or without an
    interruption in between. `progress(done, all)` is called after each batch of problems. With `relay` another model
    begins every response. `memory` keeps the counts of every finished batch and gives those it already has.

    `context` is how many tokens the models hold. A problem whose prompt does not fit it together with
    `sampling.max_tokens` is not sampled; all its samples count as wrong. Without `context` the engine refuses it.

    Raises `TrimtabError`: no problems, several samples of a greedy decode, no prompt that fits, or not a single sample
    could be scored.
    """
    require_problems(task, problems)
    if sampling.temperature == 0 and samples > 1:
        raise TrimtabError(
            f"samples = {samples} at temperature 0 are all the same; use 1 sample or a temperature above 0"
        )
    prompts = [tasks.encode(task, problem, tokenizer) for problem in problems]
    room = sys.maxsize if context is None else context - sampling.max_tokens
    _require_one_that_fits(task, prompts, sampling.max_tokens, context)
    size = max(1, min(PROMPTS_PER_CALL, RESPONSES_PER_CALL // samples))
    parts: list[Part] = []
    for number, first in enumerate(range(0, len(problems), size)):
        chosen = prompts[first : first + size]
        part = memory.get(number) if memory is not None else None
        if part is None:
            start = time.perf_counter()
            fitting = [prompt for prompt in chosen if len(prompt.ids) <= room]
            sampled, prefix = _sample(engine, fitting, samples, sampling, (seed, number), relay)
            rest = iter(sampled)
            answers = [next(rest) if len(prompt.ids) <= room else None for prompt in chosen]
            part = _count(chosen, answers, samples, prefix, scorer, start)
            if memory is not None:
                memory.append(number, part)
        parts.append(part)
        if progress is not None:
            progress(first + len(chosen), len(problems))
    return EvalResult.of(
        parts,
        task=task.name,
        samples=samples,
        temperature=sampling.temperature,
        seed=seed,
        prompt=task.prompt_style,
    )


def require_problems(task: Task, problems: Sequence[Problem]) -> None:
    if not problems:
        raise TrimtabError(
            f"task {task.name!r} has no problems to evaluate on; give it a test split (holdout, test_path)"
        )


def _require_one_that_fits(task: Task, prompts: Sequence[Prompt], max_tokens: int, context: int | None) -> None:
    shortest = min(len(prompt.ids) for prompt in prompts)
    if context is not None and shortest + max_tokens > context:
        raise TrimtabError(
            f"task {task.name!r}: no prompt fits, the shortest of {len(prompts)} has {shortest} tokens, max_tokens is "
            f"{max_tokens} and the model's context holds {context}; lower max_tokens or examples, or take another model"
        )


def _sample(
    engine: Engine,
    prompts: Sequence[Prompt],
    samples: int,
    sampling: Sampling,
    seeds: tuple[int, int],
    relay: Relay | None,
) -> tuple[list[list[Completion]], int]:
    """The responses, and how many of their tokens a relay model wrote.

    The engine's draws depend on a prompt's place in its call: each call needs a seed of its own. And the two hands of
    a relay need different ones, or a model that relays itself would merely repeat its own draws.
    """
    if not prompts:
        return [], 0
    if relay is None:
        return engine.generate(prompts, samples, sampling, seed=_seed(*seeds)), 0
    prefixes = relay.prefixes(prompts, samples, sampling, seed=_seed(*seeds, 1))
    answers = engine.generate(prompts, samples, sampling, seed=_seed(*seeds, 2), prefixes=prefixes)
    return answers, sum(len(prefix.response_ids) for group in prefixes for prefix in group)


def _seed(*words: int) -> int:
    return int(np.random.SeedSequence(words).generate_state(1)[0])


def _count(
    prompts: Sequence[Prompt],
    answers: Sequence[Sequence[Completion] | None],
    samples: int,
    prefix: int,
    scorer: Scorer,
    start: float,
) -> Part:
    """Score every answer and keep the counts; None stands for those to a prompt that does not fit: all wrong."""
    pairs = [(prompt.problem, answer) for prompt, group in zip(prompts, answers, strict=True) for answer in group or ()]
    scores = scorer.score(pairs)
    rest, verdict = iter(scores), scorer.rewards[0].name
    results = [
        ProblemResult(prompt.problem.id, samples, 0, 0.0)
        if group is None
        else _problem(prompt.problem, list(itertools.islice(rest, samples)), verdict)
        for prompt, group in zip(prompts, answers, strict=True)
    ]
    errors = [score.error or "reward failed" for score in scores if score.total is None]
    return Part(
        problems=tuple(result for result in results if result is not None),
        answers=len(pairs),
        cut=sum(answer.finish == "length" for _, answer in pairs),
        tokens=sum(len(answer.response_ids) for _, answer in pairs),
        prefix=prefix,
        failures=len(errors),
        errors=tuple(errors[:ERRORS_KEPT]),
        seconds=time.perf_counter() - start,
        too_long=sum(group is None for group in answers),
    )


def _problem(problem: Problem, scores: Sequence[Score], verdict: str) -> ProblemResult | None:
    good = [score for score in scores if score.total is not None]
    if not good:
        return None
    correct = sum(score.parts[verdict] >= 1.0 for score in good)
    return ProblemResult(problem.id, len(good), correct, sum(score.total or 0.0 for score in good) / len(good))


@dataclass(frozen=True)
class Relay:
    """The model that begins. Its own whole response is cut after `ratio` of its tokens (length truncation).

    The paper says "the first half" and leaves the symbol out: half of the relay's own response, so ratio .5. It must
    share the vocabulary of the model that completes.

    A model that relays itself samples as it does alone only where all responses are equally long: the place of the cut
    knows how long the relay's response became.
    """

    engine: Engine
    ratio: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.ratio < 1:
            raise TrimtabError(f"relay ratio {self.ratio} is not in [0, 1): it is the share the relay model writes")

    def prefixes(
        self, prompts: Sequence[Prompt], samples: int, sampling: Sampling, *, seed: int
    ) -> list[list[Completion]]:
        """One prefix for each sample of each prompt, each cut from a response of its own; a stop is never in it."""
        answers = self.engine.generate(prompts, samples, sampling, seed=seed)
        return [[cut(answer, portion(self.ratio, len(answer.response_ids))) for answer in group] for group in answers]
