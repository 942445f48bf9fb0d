"""Builds a run from a recipe and trains it. Recipes are checked before any model is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trimtab.errors import TrimtabError, first_line
from trimtab.objectives import Objective
from trimtab.runs import provenance
from trimtab.runs.directory import RunDirectory
from trimtab.trainer import custom_objective, environments, rewards, tasks
from trimtab.trainer.build_model import build_model, prepare_model, save_model_files
from trimtab.trainer.checkpoint import run_state
from trimtab.trainer.config import BATCH_BASELINE, DISTILLATION, Config
from trimtab.trainer.config.consistency import refuse
from trimtab.trainer.config.training_sections import LoraConfig
from trimtab.trainer.engines.factory import build_engines
from trimtab.trainer.environments import BuiltEnvironment
from trimtab.trainer.features import build_features
from trimtab.trainer.features.feature import Feature
from trimtab.trainer.features.routing_replay import require_mixture
from trimtab.trainer.followers import run_directory, shared_source
from trimtab.trainer.guard import Guard
from trimtab.trainer.held_out import HeldOut, build_held_out
from trimtab.trainer.learner import Learner
from trimtab.trainer.loop import Trainer
from trimtab.trainer.models.load import LoadedModel, check_same_ids
from trimtab.trainer.observer import NullObserver, Observer, open_sinks
from trimtab.trainer.optim import build_optimizer
from trimtab.trainer.ranks import current_ranks, join
from trimtab.trainer.requirements import check_recipe, task_contradictions
from trimtab.trainer.rewards import Scorer
from trimtab.trainer.rollout.async_source import AsyncSource
from trimtab.trainer.rollout.buffer import Buffer
from trimtab.trainer.rollout.canary import Canary
from trimtab.trainer.rollout.collector import Collector
from trimtab.trainer.rollout.demonstrations import DemonstratedSampler
from trimtab.trainer.rollout.prefixes import PrefixedSampler
from trimtab.trainer.rollout.prompts import PromptStream, smallest_context
from trimtab.trainer.rollout.responses import EpisodeSampler, ResponseSampler
from trimtab.trainer.rollout.source import RolloutSource, SyncSource
from trimtab.trainer.stop import Stop
from trimtab.types import Engine, Problem, RewardSpec, SamplingParams, Task

RewardFunction = Callable[[str, Problem], float]
EngineFactory = Callable[[Config, LoadedModel, Path], Sequence[Engine]]
"""Builds the engines of a recipe from the trained model and the folder with its config and tokenizer."""
TOP_LOGPROBS = 128
"""Most probable ids of each token that centering reads: more than 99.9 % of the mass (arXiv 2609.20807)."""


@dataclass(frozen=True, slots=True)
class TrainResult:
    """The run directory and the metrics of the last step."""

    run: Path
    metrics: dict[str, Any]


@dataclass(frozen=True, slots=True)
class RunParts:
    """Objective, task, environment and rewards of a recipe, built and checked before any model is loaded."""

    objective: Objective
    task: Task
    scorer: Scorer
    held_out: Sequence[HeldOut]
    environment: BuiltEnvironment | None = None
    close: Callable[[], None] = lambda: None  # ends the processes of rewards and tools


def train(
    config: Config,
    *,
    reward: RewardFunction | None = None,
    objective: Objective | None = None,
    environment: type | None = None,
    out: Path | str | None = None,
    resume: bool = False,
    observer: Observer | None = None,
    engines: EngineFactory | None = None,
    stop: Stop | None = None,
    command: str | None = None,
) -> TrainResult:
    """Trains a run and returns its directory and last metrics.

    Ctrl-C, SIGTERM or `stop` ends the run after the current step, with a checkpoint; a second signal ends it at once.

    Args:
        config: the recipe.
        reward: function of completion text and problem that replaces the recipe's rewards.
        objective: replaces the recipe's objective.
        environment: a class that replaces the recipe's environment.
        out: run directory; default: `config.out`, then `runs/run`.
        resume: continue from the newest intact checkpoint in `out`.
        engines: builds the engines, for example on a cluster. Default: engines on this machine.
        observer: receives the events of the run. Default: none.
        stop: another thread ends the run by `stop.request()`. Default: none.
        command: the command line to record in the run's provenance; default: this process's command line.

    Raises:
        TrimtabError: anything that the user can correct.
        Stopped: the run was asked to end.
    """
    stop = stop or Stop()
    observer, started = observer or NullObserver(), datetime.now(UTC)
    if config.threads:
        torch.set_num_threads(config.threads)
    with out_of_memory_as_user_error(), stop.signals(), join(), ExitStack() as cleanup:
        config, built = custom_objective.resolve(config, objective)
        parts = build_parts(config, reward, built, environment)
        cleanup.callback(parts.close)
        folder = Path(out or config.out or "runs/run")
        make = partial(RunDirectory.open, folder) if resume else partial(RunDirectory.create, folder, config.dump())
        run = cleanup.enter_context(run_directory(folder, make))
        observer.message(f"loading    {config.model.path}")
        trainer = build_trainer(config, parts, build_model(config), run, observer, engines)
        trainer.stop = stop
        cleanup.callback(trainer.source.close)
        if resume:
            run_state.resume(trainer)
        if run.writes:
            first, ranks = trainer.step + 1, current_ranks().size
            trainer.sinks = open_sinks(config.log, run.path, first_step=first)
            for sink in trainer.sinks:
                cleanup.callback(sink.close)
            text = command or provenance.command()
            start = provenance.record_start(run, config.engine.type, text, started, first_step=first, ranks=ranks)
            cleanup.enter_context(start)
        equation = trainer.learner.objective.equation(config.advantage.kind)
        observer.started(config, equation, config.trainer.steps, run.path)
        return TrainResult(run.path, trainer.train())


@contextmanager
def out_of_memory_as_user_error() -> Iterator[None]:
    """Turns out-of-memory errors, of the machine or of a device, into a `TrimtabError`."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        full = isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
        if not full:
            raise
        raise TrimtabError(
            f"the memory is full ({first_line(error)[:200]}): lower trainer.micro_batch_tokens, trainer.prompts, "
            "trainer.samples or sampling.max_tokens, or set model.gradient_checkpointing"
        ) from error


def build_parts(
    config: Config,
    reward: RewardFunction | None = None,
    objective: Objective | None = None,
    environment: type | None = None,
) -> RunParts:
    """Builds the objective (if it is not given), the task, its environment and the rewards.

    Raises `TrimtabError` for a recipe whose sections contradict each other. Loads no model.
    """
    built = objective or custom_objective.resolve(config)[1]
    check_recipe(config, built, current_ranks().size)
    longest = config.sampling.max_tokens
    task = tasks.with_max_tokens(tasks.build(config.task.name, **config.task.keywords), longest)
    others = [tasks.with_max_tokens(tasks.build(other.name, **other.keywords), longest) for other in config.eval.task]
    with ExitStack() as started:  # ends the processes that were started, if an error follows
        section = config.environment
        multi_turn = None if section is None else environments.build(section, environment)
        if multi_turn is not None:
            started.callback(multi_turn.close)
            multi_turn.refuse_unused_rewards(
                "reward=" if reward is not None else "[[reward]]" if config.reward else None
            )
            task = multi_turn.adapt(task)
        specs = [RewardSpec(r.name, r.weight, r.timeout, r.keywords) for r in config.reward]
        scorer = rewards.build(specs if reward is None else [RewardSpec(reward)], task)
        started.callback(scorer.close)
        held_out = build_held_out(config, task, scorer, others)
        for other in held_out[1:]:
            started.callback(other.scorer.close)
        eval_keys = [key for one in held_out for key in one.metrics]
        refuse(task_contradictions(config, task, [entry.name for entry in scorer.rewards], eval_keys))
        # Only the leader scores and runs episodes: on other ranks the processes end here.
        close = started.pop_all().close if current_ranks().is_leader else started.close
        return RunParts(built, task, scorer, held_out, multi_turn, close)


def build_trainer(
    config: Config,
    parts: RunParts,
    loaded: LoadedModel,
    run: RunDirectory,
    observer: Observer,
    factory: EngineFactory | None = None,
) -> Trainer:
    """Builds engines, rollout source, learner and trainer around a loaded model."""
    ranks = current_ranks()
    if run.writes and not run.model_folder.exists():
        save_model_files(loaded.model, loaded.tokenizer, run.model_folder)
    if config.routing.replay != "none":
        require_mixture(config, loaded.model)  # before engines are built
    if ranks.size > 1 and ranks.is_leader and config.engine.type == "embedded":
        # The embedded engine copies the model on the model's current device.
        loaded.model.to(ranks.device)  # pyright: ignore[reportArgumentType]
    build = factory or partial(build_engines, notify=observer.message)
    engines = build(config, loaded, run.model_folder) if ranks.is_leader else []
    with ExitStack() as started:  # closes the engines, if an error follows
        for engine in engines:
            started.callback(engine.close)
        canary = Canary.build(config, loaded.tokenizer, loaded.model)
        model = prepare_model(loaded.model, config)
        features = list(build_features(config, model, parts.objective, canary, ranks, observer.message))
        collector = _build_collector(config, parts, loaded, [getattr(engine, "context", None) for engine in engines])
        own, *others = parts.held_out
        if isinstance(collector.responses, EpisodeSampler):
            own = replace(own, episodes=collector.responses.runner)
        trainer = Trainer(
            config=config,
            source=shared_source(
                collector, partial(_build_source, parts.objective, collector, engines, observer, canary)
            ),
            learner=_build_learner(config, parts.objective, model, loaded, features),
            run=run,
            observer=observer,
            guard=Guard(config, own.task.name),
            held_out=[one.without_long(collector) for one in (own, *others)],
        )
        started.pop_all()
        return trainer


def _build_source(
    built: Objective, collector: Collector, engines: Sequence[Engine], observer: Observer, canary: Canary | None
) -> RolloutSource:
    config = collector.config
    relative = (config.advantage.kind or built.advantage) not in (BATCH_BASELINE, DISTILLATION)
    buffer = Buffer(config.trainer, relative_to_group=relative, single_behavior=built.single_behavior)
    if config.has_engine_threads:
        return AsyncSource(collector, buffer, engines, observer.message, canary)
    return SyncSource(collector, buffer, engines[0], canary)


def _build_learner(
    config: Config, built: Objective, model: nn.Module, loaded: LoadedModel, features: Sequence[Feature]
) -> Learner:
    trainer, modules = config.trainer, [module for feature in features for module in feature.modules().values()]
    reads_reference = "reference" in built.needs or config.advantage.kind == DISTILLATION
    return Learner(
        config=config,
        model=model,
        optimizer=build_optimizer(model.parameters(), config.optim, modules),
        objective=built,
        total_updates=trainer.steps * trainer.updates_per_step,
        reference=_load_reference(config, loaded) if reads_reference else None,
        features=features,
    )


def _load_reference(config: Config, loaded: LoadedModel) -> nn.Module:
    """Loads `model.reference`, or else `model.path` again, not the weights that a resumed run restores."""
    if config.model.reference is not None:
        section = config.model.model_copy(update={"path": config.model.reference, "lora": LoraConfig()})
        config = config.model_copy(update={"model": section})
    other = build_model(config)
    check_same_ids(loaded.tokenizer, other.tokenizer, f"model.reference = {config.model.path!r}")
    return prepare_model(other.model, config).requires_grad_(False)


def _build_collector(
    config: Config, parts: RunParts, loaded: LoadedModel, of_engines: Sequence[int | None]
) -> Collector:
    sampling = sampling_params(config, parts.task, centered=parts.objective.centering)
    of_model = getattr(loaded.model.config, "max_position_embeddings", None)
    context = smallest_context(config, sampling, [of_model, config.engine.context, *of_engines])
    room = None if context is None else context - sampling.max_tokens
    max_prompt = config.sampling.max_prompt_tokens or room
    stream = PromptStream(parts.task, loaded.tokenizer, config.seed, max_prompt=max_prompt)
    if config.prefix is not None:
        sampler = PrefixedSampler(config, stream, sampling)
    elif config.demonstrations is not None:
        sampler = DemonstratedSampler.load(config, stream, sampling, of_model)
    elif parts.environment is not None:
        runner = parts.environment.runner(
            loaded.tokenizer, sampling.max_tokens, partial(tasks.encode, parts.task), room
        )
        sampler = EpisodeSampler(config, stream, sampling, runner)
    else:
        sampler = ResponseSampler(config, stream, sampling)
    return Collector(config, sampler, parts.scorer, context)


def sampling_params(config: Config, task: Task, *, centered: bool) -> SamplingParams:
    """Returns the sampling parameters of a run: the recipe's distribution, the task's stop strings and length limit.

    centered: whether the objective reads the sampler's most probable ids.
    """
    top_logprobs = TOP_LOGPROBS if config.sampling.top_logprobs is None else config.sampling.top_logprobs
    return SamplingParams(
        temperature=config.sampling.temperature,
        top_p=config.sampling.top_p,
        top_k=config.sampling.top_k,
        max_tokens=task.max_tokens,
        stop=task.stop,
        top_logprobs=top_logprobs if centered else 0,
    )
