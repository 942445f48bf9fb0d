"""Evaluates models on tasks: samples responses, scores them, and counts the correct ones.

`evaluate` measures one model on one task; training calls it too. `compare` measures several models on several tasks,
with greedy and sampled responses.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from trimtab.errors import TrimtabError, require_distinct
from trimtab.trainer import environments, rewards, tasks
from trimtab.trainer.config import EnvironmentConfig
from trimtab.trainer.environments import BuiltEnvironment
from trimtab.trainer.environments.episode import EpisodeCounts
from trimtab.trainer.environments.episodes import EpisodeRunner, reset_seed
from trimtab.trainer.evaluation.eval_results import EvalResult, ProblemResult, Results
from trimtab.trainer.rewards import Scorer
from trimtab.types import Completion, Engine, Problem, Prompt, RewardSpec, SamplingParams, Task

if TYPE_CHECKING:
    from trimtab.trainer.models.load import LoadedModel

# Bounds of one engine call: the number of prompts, and approximately the number of responses.
PROMPTS_PER_CALL = 64
RESPONSES_PER_CALL = 1024
DTYPES = ("bfloat16", "float32")
Mode = Literal["greedy", "sampled"]


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
    progress: Callable[[int, int], None] = lambda _done, _all: None,
    context: int | None = None,
    episodes: EpisodeRunner | None = None,
) -> EvalResult:
    """Samples `samples` responses to every problem, scores them, and returns the counts.

    A sample is correct if its first reward is 1. The result depends on `seed` only. A temperature of 0 is greedy.
    `progress(done, all)` is called after each batch of problems. `episodes` runs multi-turn responses.

    `context` is the context length of the model in tokens. If a prompt plus `sampling.max_tokens` exceeds it, the
    problem is not sampled and all its samples count as wrong. Without `context`, the engine raises for such a prompt.

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
    """Returns the responses to the prompts of one engine call.

    `numbered` has the prompts by their position in the evaluation; `seeds` is (evaluation seed, call index). The
    engine's random draws depend on the index of a prompt in the call, so each call needs a different seed.
    """
    prompts = list(numbered.values())
    if not prompts:
        return []
    generate: Callable[..., list[list[Completion]]] = engine.generate
    if episodes is not None:
        # Not the seed itself: training and evaluation must not use the same random environments.
        base = _derive_seed(seeds[0])
        generate = partial(episodes.generate, generate, reset_seeds=[reset_seed(base, at) for at in numbered])
    return generate(prompts, samples, sampling, seed=_derive_seed(*seeds))


def _derive_seed(*words: int) -> int:
    return int(np.random.SeedSequence(words).generate_state(1)[0])


@dataclass
class _Counts:
    """Counts over batches; the samples are discarded after each batch."""

    problems: list[ProblemResult] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    answers: int = 0
    cut: int = 0  # samples that ended at the length limit
    tokens: int = 0
    too_long: int = 0  # prompts that do not fit the context
    episodes: EpisodeCounts = field(default_factory=EpisodeCounts)

    def add(
        self, prompts: Sequence[Prompt], groups: Sequence[Sequence[Completion] | None], samples: int, scorer: Scorer
    ) -> None:
        """Scores a batch; the entry of `groups` is None for a prompt that does not fit the context."""
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


@dataclass(frozen=True)
class TaskSpec:
    """A task with its options."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    reward: Sequence[RewardSpec] = ()  # if given, replaces the rewards of the task
    max_tokens: int | None = None  # if given, replaces the response limit of the task
    environment: EnvironmentConfig | None = None  # for multi-turn episodes
    recipe_dtype: str | None = field(default=None, compare=False)  # in which the recipe of the task samples


@dataclass(frozen=True)
class ModelSpec:
    """The name of a model in tables, and a context manager that yields the folder or name for `models.load`."""

    label: str
    folder: Callable[[], AbstractContextManager[str]]


@dataclass(frozen=True)
class Settings:
    """Settings of an evaluation."""

    samples: int = 1  # responses to each problem
    greedy: bool = False  # also measure one greedy response
    temperature: float | None = None  # default: greedy for one sample, 1 for several
    top_p: float = 1.0
    max_tokens: int | None = None
    problems: int | None = None  # limits each task to its first test problems
    seed: int = 0
    dtype: str = "bfloat16"  # of the engine's weights

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise TrimtabError(f"samples = {self.samples}: it must be at least 1")
        if self.dtype not in DTYPES:
            raise TrimtabError(f"unknown dtype {self.dtype!r}: use 'bfloat16' or 'float32'")
        if not 0 < self.top_p <= 1:
            raise TrimtabError(f"top_p = {self.top_p:g}: it must be above 0 and at most 1")
        if self.temperature is not None and not 0 <= self.temperature < math.inf:
            raise TrimtabError(f"temperature = {self.temperature:g}: it must be a number of at least 0")

    @property
    def sampling_temperature(self) -> float:
        return (0.0 if self.samples == 1 else 1.0) if self.temperature is None else self.temperature

    def modes(self) -> tuple[Mode, ...]:
        """Returns the modes in which each model is measured. Raises `TrimtabError` for several greedy samples."""
        if self.sampling_temperature == 0 and self.samples > 1:
            raise TrimtabError(
                f"samples = {self.samples} at temperature 0 are all the same; use 1 sample or a temperature above 0"
            )
        if self.sampling_temperature == 0:
            return ("greedy",)
        return ("greedy", "sampled") if self.greedy else ("sampled",)


@dataclass(frozen=True)
class _PreparedTask:
    """A built task with its problems and scorer."""

    label: str
    task: Task
    problems: list[Problem]
    scorer: Scorer
    environment: BuiltEnvironment | None


def compare(
    models: Sequence[ModelSpec | str],
    specs: Sequence[TaskSpec | str],
    settings: Settings,
    *,
    progress: Callable[[str, int, int], None] = lambda _what, _done, _all: None,
    notes: Sequence[str] = (),
) -> Results:
    """Measures every model on every task with the embedded engine.

    models: bundled names, folders, HF ids or `ModelSpec`s; only one model is in memory at a time. specs: names of tasks
    or `TaskSpec`s. progress: called as `progress(name, done, all)` with numbers of problems, at first with `done` = 0.
    notes: lines to show below the tables, before the notes of the tasks.
    """
    modes = settings.modes()
    model_specs = [ModelSpec(one, partial(nullcontext, one)) if isinstance(one, str) else one for one in models]
    task_specs = [TaskSpec(spec) if isinstance(spec, str) else spec for spec in specs]
    require_distinct("model", [spec.label for spec in model_specs])
    measured: dict[tuple[str, str, str], EvalResult] = {}
    with ExitStack() as stack:
        prepared_tasks = _prepare_tasks(task_specs, settings, stack)  # rewards fork: before torch is imported
        for spec in model_specs:
            model, engine = _open_model(spec, settings)
            for prepared, mode in itertools.product(prepared_tasks, modes):
                on_batch = partial(progress, f"{spec.label} · {prepared.label} · {mode}")
                result = _measure(model, engine, prepared, settings, mode, on_batch)
                measured[spec.label, prepared.label, mode] = result
            del model, engine  # before the next model is loaded
    return Results(
        models=tuple(spec.label for spec in model_specs),
        tasks=tuple(prepared.label for prepared in prepared_tasks),
        settings={**asdict(settings), "temperature": settings.sampling_temperature},
        measured=measured,
        notes=tuple(dict.fromkeys([*notes, *(note for item in prepared_tasks for note in item.task.notes)])),
    )


def _prepare_tasks(specs: Sequence[TaskSpec], settings: Settings, stack: ExitStack) -> list[_PreparedTask]:
    built = [
        tasks.with_max_tokens(tasks.build(spec.name, **spec.options), settings.max_tokens or spec.max_tokens)
        for spec in specs
    ]
    names = [task.name for task in built]
    prepared_tasks = []
    for spec, task in zip(specs, built, strict=True):
        label = task.name
        if names.count(label) > 1 and spec.options:
            label += f" ({', '.join(f'{key}={value}' for key, value in spec.options.items())})"
        problems = list(task.test if settings.problems is None else task.test[: settings.problems])
        require_problems(task, problems)
        scorer = stack.enter_context(rewards.build(spec.reward, task))
        environment = None if spec.environment is None else environments.build(spec.environment)
        if environment is not None:
            stack.callback(environment.close)
            environment.refuse_unused_rewards("[[reward]]" if spec.reward else None)
        adapted = task if environment is None else environment.adapt(task)
        prepared_tasks.append(_PreparedTask(label, adapted, problems, scorer, environment))
    require_distinct("task", [prepared.label for prepared in prepared_tasks])
    return prepared_tasks


def _open_model(spec: ModelSpec, settings: Settings) -> tuple[LoadedModel, Engine]:
    with spec.folder() as folder:
        import torch

        from trimtab.trainer.engines.embedded.embedded_engine import EmbeddedEngine
        from trimtab.trainer.models import load as models

        dtype = getattr(torch, settings.dtype)
        loaded = models.load(folder, dtype=dtype)
        loaded.model.to(models.default_device())  # pyright: ignore[reportArgumentType]
        return loaded, EmbeddedEngine(loaded.model, loaded.tokenizer, dtype)


def _measure(
    model: LoadedModel,
    engine: Engine,
    prepared: _PreparedTask,
    settings: Settings,
    mode: Mode,
    progress: Callable[[int, int], None],
) -> EvalResult:
    sampling = SamplingParams(
        temperature=0.0 if mode == "greedy" else settings.sampling_temperature,
        top_p=settings.top_p,
        max_tokens=prepared.task.max_tokens,
        stop=prepared.task.stop,
    )
    context: int | None = getattr(model.model.config, "max_position_embeddings", None)
    episodes = None
    if prepared.environment is not None:
        longest_prompt = None if context is None else context - sampling.max_tokens
        encode = partial(tasks.encode, prepared.task)
        episodes = prepared.environment.runner(model.tokenizer, sampling.max_tokens, encode, longest_prompt)
    progress(0, len(prepared.problems))
    result = evaluate(
        engine,
        model.tokenizer,
        prepared.task,
        prepared.scorer,
        problems=prepared.problems,
        samples=1 if mode == "greedy" else settings.samples,
        sampling=sampling,
        seed=settings.seed,
        progress=progress,
        context=context,
        episodes=episodes,
    )
    return replace(result, task=prepared.label)
