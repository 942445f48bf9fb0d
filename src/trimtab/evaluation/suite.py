"""Evaluates several models on several tasks: greedy, sampled and relayed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from trimtab import rewards, tasks
from trimtab.errors import TrimtabError
from trimtab.evaluation.eval_result import EvalResult
from trimtab.evaluation.eval_tables import Results
from trimtab.evaluation.evaluator import Progress, Relay, evaluate, require_problems
from trimtab.evaluation.result_store import Store
from trimtab.evaluation.settings import Mode, ModelSpec, Settings, TaskSpec
from trimtab.rewards import Scorer
from trimtab.types import Engine, Problem, RewardSpec, SamplingParams, Task


class Watch(NamedTuple):
    """Progress callbacks: `begin(name, responses)` before each evaluation and `advance(responses)` during it."""

    begin: Callable[[str, int], None]
    advance: Callable[[int], None]


@dataclass(frozen=True)
class _Bench:
    """A built task with its problems and scorer."""

    label: str
    spec: TaskSpec
    task: Task
    problems: list[Problem]
    scorer: Scorer


@dataclass(frozen=True)
class _Subject:
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
    watch: Watch | None = None,
) -> Results:
    """Measures every model on every task with the embedded engine.

    Args:
        models: bundled names, folders, HF ids or `ModelSpec`s; one is in memory at a time.
        relay: begins the responses of a further measurement of each model (see `Relay`).
        out: a folder for finished batches; the same call continues there with the same bits as an uninterrupted one.

    Raises:
        TrimtabError: a task twice, tasks or models that cannot be used, other settings in `out`.
    """
    modes = settings.modes(relay is not None)
    subjects = [ModelSpec.of(model) if isinstance(model, str) else model for model in models]
    _require_distinct("model", [subject.label for subject in subjects])
    measured: dict[tuple[str, str, str], EvalResult] = {}
    with ExitStack() as stack:
        benches = _benches(specs, settings, stack)  # before torch is imported: rewards fork
        store = stack.enter_context(Store(out, _shared(settings))) if out is not None else None
        relay_model = _open_model(relay, settings, store) if relay is not None else None
        for spec in subjects:
            for (task, mode), result in _measure_all(spec, benches, modes, settings, relay_model, store, watch):
                measured[spec.label, task, mode] = result
        results = Results(
            models=tuple(subject.label for subject in subjects),
            tasks=tuple(bench.label for bench in benches),
            relay=relay.label if relay is not None else None,
            settings={**asdict(settings), "temperature": settings.sampling_temperature},
            found=measured,
            notes=tuple(dict.fromkeys(note for bench in benches for note in bench.task.notes)),
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
    watch = _counting(progress, samples) if progress is not None else None
    [result] = compare([model], [TaskSpec(task, options or {}, reward)], settings, watch=watch).found.values()
    return result


def _counting(progress: Progress, samples: int) -> Watch:
    """Returns callbacks that report the responses of one evaluation as `progress(done, all)` problems."""
    counts = [0, 0]

    def begin(_what: str, responses: int) -> None:
        counts[:] = [0, responses]

    def advance(responses: int) -> None:
        counts[0] += responses
        progress(counts[0] // samples, counts[1] // samples)

    return Watch(begin, advance)


def _benches(specs: Sequence[TaskSpec], settings: Settings, stack: ExitStack) -> list[_Bench]:
    built = [tasks.build(spec.name, **spec.options) for spec in specs]
    names = [task.name for task in built]
    benches = []
    for spec, task in zip(specs, built, strict=True):
        label = task.name
        if names.count(label) > 1 and spec.options:
            label += f" ({', '.join(f'{key}={value}' for key, value in spec.options.items())})"
        problems = list(task.test if settings.problems is None else task.test[: settings.problems])
        require_problems(task, problems)
        scorer = stack.enter_context(rewards.build(spec.reward, task))
        benches.append(_Bench(label, spec, task, problems, scorer))
    _require_distinct("task", [bench.label for bench in benches])
    return benches


def _require_distinct(kind: str, labels: Sequence[str]) -> None:
    twice = next((label for number, label in enumerate(labels) if label in labels[:number]), None)
    if twice is not None:
        raise TrimtabError(f"{kind} {twice!r} is given twice; name it once")


def _open_model(spec: ModelSpec, settings: Settings, store: Store | None) -> _Subject:
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
        return _Subject(spec.label, engine, loaded.tokenizer, weights, context)


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
    benches: Sequence[_Bench],
    modes: Sequence[Mode],
    settings: Settings,
    relay_model: _Subject | None,
    store: Store | None,
    watch: Watch | None,
) -> Iterator[tuple[tuple[str, Mode], EvalResult]]:
    """Yields the result of every task and mode of one model, which is in memory only for this time."""
    subject = _open_model(spec, settings, store)
    if relay_model is not None and relay_model.tokenizer.get_vocab() != subject.tokenizer.get_vocab():
        raise TrimtabError(
            f"relay {relay_model.label!r} and {spec.label!r} have different vocabularies: use one family"
        )
    for bench in benches:
        for mode in modes:
            relay = relay_model if mode == "relay" else None
            yield (bench.label, mode), _measure(subject, bench, settings, mode, relay, store, watch)


def _measure(
    subject: _Subject,
    bench: _Bench,
    settings: Settings,
    mode: Mode,
    relay_model: _Subject | None,
    store: Store | None,
    watch: Watch | None,
) -> EvalResult:
    """Returns the result of one model, task and mode."""
    samples = 1 if mode == "greedy" else settings.samples
    sampling = SamplingParams(
        temperature=0.0 if mode == "greedy" else settings.sampling_temperature,
        top_p=settings.top_p,
        max_tokens=settings.max_tokens or bench.spec.max_tokens or bench.task.max_tokens,
        stop=bench.task.stop,
    )
    batches = None
    if store is not None:
        header = _header(subject, bench, samples, sampling, settings)
        if relay_model is not None:
            header["relay"] = {"weights": relay_model.weights, "ratio": settings.relay_ratio}
        batches = store.parts(f"{subject.label} {bench.label} {mode}", header)
    contexts = [one.context for one in (subject, relay_model) if one is not None and one.context is not None]
    if watch is not None:
        watch.begin(f"{subject.label} · {bench.label} · {mode}", samples * len(bench.problems))
    result = evaluate(
        subject.engine,
        subject.tokenizer,
        bench.task,
        bench.scorer,
        problems=bench.problems,
        samples=samples,
        sampling=sampling,
        seed=settings.seed,
        progress=_advancing(watch, samples) if watch is not None else None,
        relay=Relay(relay_model.engine, settings.relay_ratio) if relay_model is not None else None,
        store=batches,
        context=min(contexts, default=None),
    )
    return replace(result, task=bench.label)


def _advancing(watch: Watch, samples: int) -> Progress:
    done = 0

    def progress(count: int, _all: int) -> None:
        nonlocal done
        watch.advance(samples * (count - done))
        done = count

    return progress


def _shared(settings: Settings) -> dict[str, Any]:
    """Returns the settings that all results of a folder share; a greedy or relay column may be added later."""
    kept = {**asdict(settings), "temperature": settings.sampling_temperature}
    return {key: value for key, value in kept.items() if key not in ("greedy", "relay_ratio")}


def _header(
    subject: _Subject, bench: _Bench, samples: int, sampling: SamplingParams, settings: Settings
) -> dict[str, Any]:
    """Returns everything that the counts of one model, task and mode depend on."""
    prompts = [tasks.encode(bench.task, problem, subject.tokenizer) for problem in bench.problems]
    digest = hashlib.sha256()
    for prompt in prompts:
        problem = prompt.problem
        extra = json.dumps(problem.extra, sort_keys=True, default=str)
        digest.update(json.dumps([problem.id, problem.answer, extra, prompt.ids.tolist()]).encode())
    return {
        "model": {"weights": subject.weights},
        "task": {
            "options": {key: str(value) for key, value in bench.spec.options.items()},
            "rewards": [_reward(spec) for spec in (bench.spec.reward or bench.task.rewards)],
            "problems": digest.hexdigest()[:16],
        },
        "samples": samples,
        **asdict(sampling),
        "seed": settings.seed,
        "dtype": settings.dtype,
    }


def _reward(spec: RewardSpec) -> str:
    name = spec.name if isinstance(spec.name, str) else f"{spec.name.__module__}:{spec.name.__qualname__}"
    return f"{name} weight={spec.weight} {dict(spec.options)}"
