"""Evaluates several models on several tasks: greedy, sampled and relayed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from trimtab import environments, rewards, tasks
from trimtab.environments import BuiltEnvironment, EnvironmentSpec
from trimtab.errors import TrimtabError
from trimtab.evaluation.eval_result import EvalResult
from trimtab.evaluation.eval_tables import Results
from trimtab.evaluation.evaluator import Progress, Relay, evaluate, require_problems
from trimtab.evaluation.result_store import Store
from trimtab.evaluation.settings import Mode, ModelSpec, Settings, TaskSpec
from trimtab.rewards import Scorer
from trimtab.rollout.environment_section import refuse_unused_rewards
from trimtab.types import Engine, Problem, RewardSpec, SamplingParams, Task


class EvalProgress(NamedTuple):
    """Progress callbacks: `begin(name, responses)` before each evaluation and `advance(responses)` during it."""

    begin: Callable[[str, int], None]
    advance: Callable[[int], None]


@dataclass(frozen=True)
class _PreparedTask:
    """A built task with its problems and scorer."""

    label: str
    spec: TaskSpec
    task: Task
    problems: list[Problem]
    scorer: Scorer
    environment: BuiltEnvironment | None


@dataclass(frozen=True)
class _Sampler:
    """A loaded model with its engine."""

    label: str
    engine: Engine
    tokenizer: Any
    weights: str  # with a store: a hash of weights and config, which decide its responses
    context: int | None  # largest number of tokens of a prompt and its response; None: no limit


def compare(
    models: Sequence[ModelSpec | str],
    specs: Sequence[TaskSpec],
    settings: Settings,
    *,
    relay: ModelSpec | None = None,
    out: Path | None = None,
    progress: EvalProgress | None = None,
    notes: Sequence[str] = (),
) -> Results:
    """Measures every model on every task with the embedded engine.

    Args:
        models: bundled names, folders, HF ids or `ModelSpec`s; one is in memory at a time.
        relay: begins the responses of a further measurement of each model (see `Relay`).
        out: a folder for finished batches; the same call continues there with the same bits as an uninterrupted one.
        notes: lines below the tables, besides those of the tasks.

    Raises:
        TrimtabError: a task twice, tasks or models that cannot be used, other settings in `out`.
    """
    modes = settings.modes(relay is not None)
    model_specs = [ModelSpec.of(model) if isinstance(model, str) else model for model in models]
    _require_distinct("model", [spec.label for spec in model_specs])
    measured: dict[tuple[str, str, str], EvalResult] = {}
    with ExitStack() as stack:
        prepared_tasks = _prepare_tasks(specs, settings, stack)  # before torch is imported: rewards fork
        store = stack.enter_context(Store(out, _shared_settings(settings))) if out is not None else None
        relay_model = _open_model(relay, settings, store) if relay is not None else None
        for spec in model_specs:
            for (task, mode), result in _measure_all(
                spec, prepared_tasks, modes, settings, relay_model, store, progress
            ):
                measured[spec.label, task, mode] = result
        results = Results(
            models=tuple(spec.label for spec in model_specs),
            tasks=tuple(prepared.label for prepared in prepared_tasks),
            relay=relay.label if relay is not None else None,
            settings={**asdict(settings), "temperature": settings.sampling_temperature},
            measured=measured,
            notes=tuple(dict.fromkeys([*notes, *(note for item in prepared_tasks for note in item.task.notes)])),
        )
        if store is not None:
            store.write("results.json", json.dumps(results.as_dict(), indent=1, ensure_ascii=False) + "\n")
            store.write("results.md", results.markdown())
    return results


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
    """Evaluates a model (bundled name, folder or HF id) on a task's test split with the embedded engine.

    `problems` limits how many test problems are used (the first ones); `temperature` defaults to greedy for one sample
    and 1 for several; `reward` to the task's own. `dtype` is that of the engine.
    """
    settings = Settings(
        samples=samples,
        temperature=temperature,
        top_p=top_p,
        max_tokens=max_tokens,
        problems=problems,
        seed=seed,
        dtype=dtype,
    )
    callbacks = _progress_in_problems(progress, samples) if progress is not None else None
    [result] = compare([model], [TaskSpec(task, options or {}, reward)], settings, progress=callbacks).measured.values()
    return result


def _progress_in_problems(progress: Progress, samples: int) -> EvalProgress:
    """Returns callbacks that report the responses of one evaluation as `progress(done, all)` problems."""
    counts = [0, 0]

    def begin(_what: str, responses: int) -> None:
        counts[:] = [0, responses]

    def advance(responses: int) -> None:
        counts[0] += responses
        progress(counts[0] // samples, counts[1] // samples)

    return EvalProgress(begin, advance)


def _prepare_tasks(specs: Sequence[TaskSpec], settings: Settings, stack: ExitStack) -> list[_PreparedTask]:
    built = [tasks.build(spec.name, **spec.options) for spec in specs]
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
            refuse_unused_rewards(environment, "[[reward]]" if spec.reward else None)
        adapted = task if environment is None else environment.adapt(task)
        prepared_tasks.append(_PreparedTask(label, spec, adapted, problems, scorer, environment))
    _require_distinct("task", [prepared.label for prepared in prepared_tasks])
    return prepared_tasks


def _require_distinct(kind: str, labels: Sequence[str]) -> None:
    twice = next((label for number, label in enumerate(labels) if label in labels[:number]), None)
    if twice is not None:
        raise TrimtabError(f"{kind} {twice!r} is given twice; name it once")


def _open_model(spec: ModelSpec, settings: Settings, store: Store | None) -> _Sampler:
    with spec.folder() as folder:
        import torch

        from trimtab.engines.embedded.embedded_engine import EmbeddedEngine
        from trimtab.models import load as models

        dtype = getattr(torch, settings.dtype)
        loaded = models.load(folder, dtype=dtype)
        loaded.model.to(models.default_device())  # pyright: ignore[reportArgumentType]
        engine = EmbeddedEngine(loaded.model, loaded.tokenizer, dtype)
        weights = _fingerprint(engine, loaded.model) if store is not None else ""
        context = getattr(loaded.model.config, "max_position_embeddings", None)
        return _Sampler(spec.label, engine, loaded.tokenizer, weights, context)


def _fingerprint(engine: Engine, model: Any) -> str:
    """Returns a short hash of what decides a model's responses: weights, config, generation config and device."""
    import torch

    digest = hashlib.sha256(str(model.device.type).encode())
    for part in (model.config, model.generation_config):
        settings = {} if part is None else part.to_dict()
        named = {key: value for key, value in settings.items() if key not in ("_name_or_path", "transformers_version")}
        digest.update(json.dumps(named, sort_keys=True, default=str).encode())
    for name, tensor in engine.named_weights():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


def _measure_all(
    spec: ModelSpec,
    prepared_tasks: Sequence[_PreparedTask],
    modes: Sequence[Mode],
    settings: Settings,
    relay_model: _Sampler | None,
    store: Store | None,
    progress: EvalProgress | None,
) -> Iterator[tuple[tuple[str, Mode], EvalResult]]:
    """Yields the result of every task and mode of one model, which is in memory only for this time."""
    sampler = _open_model(spec, settings, store)
    if relay_model is not None and relay_model.tokenizer.get_vocab() != sampler.tokenizer.get_vocab():
        raise TrimtabError(
            f"relay {relay_model.label!r} and {spec.label!r} have different vocabularies: use one family"
        )
    for prepared in prepared_tasks:
        for mode in modes:
            relay = relay_model if mode == "relay" else None
            yield (prepared.label, mode), _measure(sampler, prepared, settings, mode, relay, store, progress)


def _measure(
    sampler: _Sampler,
    prepared: _PreparedTask,
    settings: Settings,
    mode: Mode,
    relay_model: _Sampler | None,
    store: Store | None,
    progress: EvalProgress | None,
) -> EvalResult:
    """Returns the result of one model, task and mode."""
    samples = 1 if mode == "greedy" else settings.samples
    sampling = SamplingParams(
        temperature=0.0 if mode == "greedy" else settings.sampling_temperature,
        top_p=settings.top_p,
        max_tokens=settings.max_tokens or prepared.spec.max_tokens or prepared.task.max_tokens,
        stop=prepared.task.stop,
    )
    environment = prepared.environment
    if environment is not None and relay_model is not None:
        raise TrimtabError(f"task {prepared.label!r} has an environment, whose episodes no relay model can begin")
    batches = None
    if store is not None:
        header = _header(sampler, prepared, samples, sampling, settings)
        if relay_model is not None:
            header["relay"] = {"weights": relay_model.weights, "ratio": settings.relay_ratio}
        batches = store.parts(f"{sampler.label} {prepared.label} {mode}", header)
    contexts = [one.context for one in (sampler, relay_model) if one is not None and one.context is not None]
    context = min(contexts, default=None)
    if progress is not None:
        progress.begin(f"{sampler.label} · {prepared.label} · {mode}", samples * len(prepared.problems))
    result = evaluate(
        sampler.engine,
        sampler.tokenizer,
        prepared.task,
        prepared.scorer,
        problems=prepared.problems,
        samples=samples,
        sampling=sampling,
        seed=settings.seed,
        progress=_progress_of(progress, samples) if progress is not None else None,
        relay=Relay(relay_model.engine, settings.relay_ratio) if relay_model is not None else None,
        store=batches,
        context=context,
        episodes=None
        if environment is None
        else environment.runner(
            sampler.tokenizer,
            sampling.max_tokens,
            partial(tasks.encode, prepared.task),
            None if context is None else context - sampling.max_tokens,
        ),
    )
    return replace(result, task=prepared.label)


def _progress_of(progress: EvalProgress, samples: int) -> Progress:
    """Returns a callback for `evaluate` that advances `progress` by responses."""
    done = 0

    def on_batch(count: int, _all: int) -> None:
        nonlocal done
        progress.advance(samples * (count - done))
        done = count

    return on_batch


def _shared_settings(settings: Settings) -> dict[str, Any]:
    """Returns the settings that all results of a folder share; a greedy or relay column may be added later."""
    kept = {**asdict(settings), "temperature": settings.sampling_temperature}
    return {key: value for key, value in kept.items() if key not in ("greedy", "relay_ratio")}


def _header(
    sampler: _Sampler, prepared: _PreparedTask, samples: int, sampling: SamplingParams, settings: Settings
) -> dict[str, Any]:
    """Returns everything that the counts of one model, task and mode depend on."""
    prompts = [tasks.encode(prepared.task, problem, sampler.tokenizer) for problem in prepared.problems]
    digest = hashlib.sha256()
    for prompt in prompts:
        problem = prompt.problem
        extra = json.dumps(problem.extra, sort_keys=True, default=str)
        digest.update(json.dumps([problem.id, problem.answer, extra, prompt.ids.tolist()]).encode())
    return {
        "model": {"weights": sampler.weights},
        "task": {
            "options": {key: str(value) for key, value in prepared.spec.options.items()},
            "rewards": [_reward_description(spec) for spec in (prepared.spec.reward or prepared.task.rewards)],
            "problems": digest.hexdigest()[:16],
            "environment": _environment_description(prepared.spec.environment),
        },
        "samples": samples,
        **asdict(sampling),
        "seed": settings.seed,
        "dtype": settings.dtype,
    }


def _environment_description(spec: EnvironmentSpec | None) -> dict[str, Any] | None:
    if spec is None:
        return None
    name = spec.name if isinstance(spec.name, str) else f"{spec.name.__module__}:{spec.name.__qualname__}"
    options = {key: str(value) for key, value in spec.options.items()}
    return {item.name: getattr(spec, item.name) for item in fields(spec)} | {"name": name, "options": options}


def _reward_description(spec: RewardSpec) -> str:
    name = spec.name if isinstance(spec.name, str) else f"{spec.name.__module__}:{spec.name.__qualname__}"
    return f"{name} weight={spec.weight} {dict(spec.options)}"
