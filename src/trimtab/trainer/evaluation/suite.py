"""Evaluates several models on several tasks: greedy, sampled and relayed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from trimtab.errors import TrimtabError
from trimtab.runs import atomic
from trimtab.trainer import environments, rewards, tasks
from trimtab.trainer.environments import BuiltEnvironment, EnvironmentSpec
from trimtab.trainer.evaluation.eval_result import EvalResult
from trimtab.trainer.evaluation.eval_tables import Results
from trimtab.trainer.evaluation.evaluator import Relay, evaluate, require_problems
from trimtab.trainer.evaluation.result_store import PartFile, results_folder
from trimtab.trainer.evaluation.settings import Mode, ModelSpec, Settings, TaskSpec
from trimtab.trainer.rewards import Scorer
from trimtab.trainer.rollout.episode_responses import refuse_unused_rewards
from trimtab.types import Engine, Problem, RewardSpec, SamplingParams, Task


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
    weights: str  # where batches are kept: a hash of weights and config, which decide its responses
    context: int | None  # largest number of tokens of a prompt and its response; None: no limit


def compare(
    models: Sequence[ModelSpec | str],
    specs: Sequence[TaskSpec],
    settings: Settings,
    *,
    relay: ModelSpec | None = None,
    out: Path | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    notes: Sequence[str] = (),
) -> Results:
    """Measures every model on every task with the embedded engine.

    Args:
        models: bundled names, folders, HF ids or `ModelSpec`s; one is in memory at a time.
        relay: begins the responses of a further measurement of each model (see `Relay`).
        out: a folder for finished batches; the same call continues there with the same bits as an uninterrupted one.
        progress: called as `progress(name, done, all)` with numbers of problems, first with `done` 0.
        notes: lines below the tables, besides those of the tasks.

    Raises:
        TrimtabError: a task twice, tasks or models that cannot be used, other settings in `out`.
    """
    modes = settings.modes(relay is not None)
    model_specs = [ModelSpec.of(model) if isinstance(model, str) else model for model in models]
    _require_distinct("model", [spec.label for spec in model_specs])
    shown_settings = {**asdict(settings), "temperature": settings.sampling_temperature}
    measured: dict[tuple[str, str, str], EvalResult] = {}
    with ExitStack() as stack:
        prepared_tasks = _prepare_tasks(specs, settings, stack)  # before torch is imported: rewards fork
        if out is not None:
            # A greedy or relay column may be added later.
            shared = {key: value for key, value in shown_settings.items() if key not in ("greedy", "relay_ratio")}
            stack.enter_context(results_folder(out, shared))
        relay_model = _open_model(relay, settings, out) if relay is not None else None
        for spec in model_specs:
            sampler = _open_model(spec, settings, out)
            if relay_model is not None and relay_model.tokenizer.get_vocab() != sampler.tokenizer.get_vocab():
                raise TrimtabError(
                    f"relay {relay_model.label!r} and {spec.label!r} have different vocabularies: use one family"
                )
            for prepared in prepared_tasks:
                for mode in modes:
                    begins = relay_model if mode == "relay" else None
                    result = _measure(sampler, prepared, settings, mode, begins, out, progress)
                    measured[spec.label, prepared.label, mode] = result
            del sampler  # before the next model is loaded
        results = Results(
            models=tuple(spec.label for spec in model_specs),
            tasks=tuple(prepared.label for prepared in prepared_tasks),
            relay=relay.label if relay is not None else None,
            settings=shown_settings,
            measured=measured,
            notes=tuple(dict.fromkeys([*notes, *(note for item in prepared_tasks for note in item.task.notes)])),
        )
        if out is not None:
            text = json.dumps(results.as_dict(), indent=1, ensure_ascii=False)
            atomic.write_text(out / "results.json", text + "\n")
            atomic.write_text(out / "results.md", results.markdown())
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
    progress: Callable[[int, int], None] | None = None,
) -> EvalResult:
    """Evaluates a model (bundled name, folder or HF id) on a task's test split with the embedded engine.

    `reward` defaults to the task's own; `progress(done, all)` is called with numbers of problems; the others are those
    of `Settings`.
    """
    settings = Settings(
        samples, temperature=temperature, top_p=top_p, max_tokens=max_tokens, problems=problems, seed=seed, dtype=dtype
    )
    on_batch = None if progress is None else lambda _name, done, count: progress(done, count)
    [result] = compare([model], [TaskSpec(task, options or {}, reward)], settings, progress=on_batch).measured.values()
    return result


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


def _open_model(spec: ModelSpec, settings: Settings, out: Path | None) -> _Sampler:
    with spec.folder() as folder:
        import torch

        from trimtab.trainer.engines.embedded.embedded_engine import EmbeddedEngine
        from trimtab.trainer.models import load as models

        dtype = getattr(torch, settings.dtype)
        loaded = models.load(folder, dtype=dtype)
        loaded.model.to(models.default_device())  # pyright: ignore[reportArgumentType]
        engine = EmbeddedEngine(loaded.model, loaded.tokenizer, dtype)
        weights = _fingerprint(engine, loaded.model) if out is not None else ""
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


def _measure(
    sampler: _Sampler,
    prepared: _PreparedTask,
    settings: Settings,
    mode: Mode,
    relay_model: _Sampler | None,
    out: Path | None,
    progress: Callable[[str, int, int], None] | None,
) -> EvalResult:
    """Returns the result of one model, task and mode."""
    samples = 1 if mode == "greedy" else settings.samples
    sampling = SamplingParams(
        temperature=0.0 if mode == "greedy" else settings.sampling_temperature,
        top_p=settings.top_p,
        max_tokens=settings.max_tokens or prepared.spec.max_tokens or prepared.task.max_tokens,
        stop=prepared.task.stop,
    )
    if prepared.environment is not None and relay_model is not None:
        raise TrimtabError(f"task {prepared.label!r} has an environment, whose episodes no relay model can begin")
    store = None
    if out is not None:
        header = _header(sampler, prepared, samples, sampling, settings)
        if relay_model is not None:
            header["relay"] = {"weights": relay_model.weights, "ratio": settings.relay_ratio}
        store = PartFile(out, f"{sampler.label} {prepared.label} {mode}", header)
    contexts = [model.context for model in (sampler, relay_model) if model is not None and model.context is not None]
    context = min(contexts, default=None)
    episodes = None
    if prepared.environment is not None:
        longest_prompt = None if context is None else context - sampling.max_tokens
        encode = partial(tasks.encode, prepared.task)
        episodes = prepared.environment.runner(sampler.tokenizer, sampling.max_tokens, encode, longest_prompt)
    on_batch = None
    if progress is not None:
        on_batch = partial(progress, f"{sampler.label} · {prepared.label} · {mode}")
        on_batch(0, len(prepared.problems))
    result = evaluate(
        sampler.engine,
        sampler.tokenizer,
        prepared.task,
        prepared.scorer,
        problems=prepared.problems,
        samples=samples,
        sampling=sampling,
        seed=settings.seed,
        progress=on_batch,
        relay=Relay(relay_model.engine, settings.relay_ratio) if relay_model is not None else None,
        store=store,
        context=context,
        episodes=episodes,
    )
    return replace(result, task=prepared.label)


def _header(
    sampler: _Sampler, prepared: _PreparedTask, samples: int, sampling: SamplingParams, settings: Settings
) -> dict[str, Any]:
    """Returns everything that the counts of one model, task and mode depend on."""
    digest = hashlib.sha256()
    for problem in prepared.problems:
        ids = tasks.encode(prepared.task, problem, sampler.tokenizer).ids.tolist()
        extra = json.dumps(problem.extra, sort_keys=True, default=str)
        digest.update(json.dumps([problem.id, problem.answer, extra, ids]).encode())
    environment = prepared.spec.environment
    return {
        "model": {"weights": sampler.weights},
        "task": {
            "options": _as_text(prepared.spec.options),
            "rewards": [
                f"{_name(spec)} weight={spec.weight} {dict(spec.options)}"
                for spec in (prepared.spec.reward or prepared.task.rewards)
            ],
            "problems": digest.hexdigest()[:16],
            "environment": None
            if environment is None
            else {item.name: getattr(environment, item.name) for item in fields(environment)}
            | {"name": _name(environment), "options": _as_text(environment.options)},
        },
        "samples": samples,
        **asdict(sampling),
        "seed": settings.seed,
        "dtype": settings.dtype,
    }


def _name(spec: EnvironmentSpec | RewardSpec) -> str:
    return spec.name if isinstance(spec.name, str) else f"{spec.name.__module__}:{spec.name.__qualname__}"


def _as_text(options: Mapping[str, Any]) -> dict[str, str]:
    return {key: str(value) for key, value in options.items()}
