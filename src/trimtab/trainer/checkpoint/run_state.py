"""Saves the state of a run as a checkpoint, and restores it bit for bit."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from trimtab.errors import TrimtabError
from trimtab.files import parse_toml
from trimtab.runs import atomic
from trimtab.runs.directory import RunDirectory
from trimtab.runs.layout import CONFIG, checkpoint_folder
from trimtab.text import flatten
from trimtab.trainer.checkpoint import state_tensors, store
from trimtab.trainer.config import Config, parse_config
from trimtab.trainer.custom_objective import refuse_other
from trimtab.trainer.guard import Guard
from trimtab.trainer.learner import Learner
from trimtab.trainer.observer import Observer
from trimtab.trainer.ranks import current_ranks
from trimtab.trainer.rollout.source import RolloutSource
from trimtab.trainer.stop import IdleSteps

KEYS_FREE_TO_CHANGE = ("out", "description", "threads", "eval", "diagnose", "checkpoint", "log", "compare", "guard")
KEYS_FREE_TO_CHANGE += ("placement", "ray", "sharding")


@dataclass(kw_only=True)
class TrainerState(ABC):
    """The state of a trainer that a checkpoint holds, and the methods that resuming and the guard call."""

    config: Config
    source: RolloutSource
    learner: Learner
    run: RunDirectory
    observer: Observer
    guard: Guard
    idle: IdleSteps = field(default_factory=IdleSteps)
    step: int = 0  # finished steps; `learner.updates` counts optimizer updates

    @abstractmethod
    def log_restored(self, metrics: Mapping[str, Any]) -> None: ...


def save(trainer: TrainerState, evaluated: Mapping[str, float], *, wait: bool = True) -> None:
    """Saves the last finished step, marks it if it is the best so far, and deletes old checkpoints.

    evaluated: the evaluation of this step. wait: return when the checkpoint is on the disk; otherwise a thread waits
    for that and then gives it its final name. A step that may be the best so far needs `wait`.
    """
    run = trainer.run
    current_ranks().run_on_all_ranks(run.finish_saving)
    needed, later = trainer.guard.needed_checkpoints(run, trainer.step), None if wait else run.finish_later
    store.save(run.checkpoint_root, trainer.step, *capture(trainer, evaluated), later=later)
    if wait:
        store.mark_best(run.checkpoint_root, trainer.step, *_best(trainer, evaluated))
    store.delete_old(run.checkpoint_root, trainer.config.checkpoint.keep, needed)


def save_if_unsaved(trainer: TrainerState) -> None:
    """Saves the last finished step, unless it has a checkpoint, which a failed step must not overwrite."""
    saved = current_ranks().run_on_all_ranks(trainer.run.checkpoints)
    exists = checkpoint_folder(trainer.run.checkpoint_root, trainer.step) in saved
    if not current_ranks().broadcast_bool(exists):
        save(trainer, {})


def has_improved(trainer: TrainerState, evaluated: Mapping[str, float]) -> bool:
    """Whether this step has the best value of `eval.best` so far; the value before training does not count."""
    # The leader decides: on a shared file system other ranks may still read the previous best.json.
    return current_ranks().broadcast_bool(store.is_best(trainer.run.checkpoint_root, *_best(trainer, evaluated)))


def _best(trainer: TrainerState, evaluated: Mapping[str, float]) -> tuple[str, float]:
    """Returns the label of `eval.best` and the mean of its metrics.

    The mean is NaN if there are no metrics, or if this step was not evaluated or not by the current `eval.best`.
    """
    section = trainer.config.eval
    values = [evaluated.get(name, math.nan) for name in section.best_metrics]
    return section.best_label, sum(values) / len(values) if values else math.nan


def capture(
    trainer: TrainerState, evaluated: Mapping[str, float]
) -> tuple[dict[str, Any], dict[str, Any], dict[str, bytes]]:
    """Returns the state of a run: tensors by section, JSON, and files. `evaluated`: this step's evaluation."""
    learner = trainer.learner
    optimizer, groups = state_tensors.optimizer_state(learner.optimizer, learner.trained)
    source_tensors, source_data, files = trainer.source.state(learner.updates)
    tensors = {
        **{name: state_tensors.model_state(module) for name, module in learner.modules.items()},
        "optimizer": optimizer,
        **source_tensors,
        **{section: named for feature in learner.features for section, named in feature.tensors().items()},
    }
    meta = {
        "step": trainer.step,
        "measured": dict(evaluated),
        "updates": learner.updates,
        "bad_in_a_row": learner.bad_in_a_row,
        "micro_batch_tokens": learner.micro_batch_tokens,
        "idle": trainer.idle.steps,
        "source": source_data,
        "optimizer": groups,
        "random": state_tensors.rng_state(),
        "features": {type(feature).__name__: feature.state() for feature in learner.features},
        "guard": asdict(trainer.guard.state) if trainer.guard.is_on else {},
    }
    return tensors, meta, files


def resume(trainer: TrainerState) -> None:
    """Continues from the newest intact checkpoint; a run killed before its first one starts over in its directory."""
    run = trainer.run
    _check_same_recipe(run, trainer.config)
    checkpoint = store.latest(run.checkpoint_root, notify=trainer.observer.message)
    if checkpoint is not None:
        # This may raise, so it comes before anything changes on the disk.
        trainer.guard.load(trainer.learner, checkpoint.meta["guard"])
    if run.writes:
        atomic.write_text(run.path / CONFIG, trainer.config.dump())
    run.truncate_after(-1 if checkpoint is None else checkpoint.step)
    if checkpoint is None:
        trainer.observer.message(f"no checkpoint in {run.path} yet: starting from the beginning")
        return
    _restore(trainer, checkpoint)
    if "engine" not in checkpoint.tensors:
        trainer.learner.publish_to(trainer.source)
    trainer.source.restore(checkpoint.tensors, checkpoint.meta["source"], checkpoint.files)
    # In case the run was killed between saving and marking.
    store.mark_best(run.checkpoint_root, trainer.step, *_best(trainer, checkpoint.meta["measured"]))
    trainer.observer.message(f"resumed from {checkpoint.folder}")


def go_back(trainer: TrainerState, steps: Collection[int], halvings: int) -> store.LoadedCheckpoint:
    """Restores the newest intact checkpoint of `steps` in a running trainer, which keeps its step number.

    All responses that are waiting or being generated are dropped, and the engines get the restored weights. halvings:
    how often the bound on the age of tokens is halved. Raises `TrimtabError` if no checkpoint is intact.
    """
    number = trainer.step
    checkpoint = store.latest(trainer.run.checkpoint_root, notify=trainer.observer.message, among=steps)
    assert checkpoint is not None, "the guard saves the policy before the first step"
    _restore(trainer, checkpoint)
    trainer.step, trainer.learner.bad_in_a_row = number, 0
    trainer.learner.publish_to(trainer.source)
    trainer.source.restore({}, {**checkpoint.meta["source"], "ready": [], "halvings": halvings}, checkpoint.files)
    return checkpoint


def _restore(trainer: TrainerState, checkpoint: store.LoadedCheckpoint) -> None:
    """Restores everything except the rollout source."""
    learner, meta = trainer.learner, checkpoint.meta
    for name, module in learner.modules.items():
        state_tensors.load_model_state(module, checkpoint.tensors[name])
    state_tensors.load_optimizer_state(
        learner.optimizer, learner.trained, checkpoint.tensors["optimizer"], meta["optimizer"]
    )
    state_tensors.set_rng_state(meta["random"])
    trainer.step = meta["step"]
    learner.updates = meta["updates"]
    learner.bad_in_a_row = meta["bad_in_a_row"]
    learner.micro_batch_tokens = meta["micro_batch_tokens"]
    trainer.idle.steps = meta["idle"]
    for feature in learner.features:
        feature.load_state(learner, meta["features"][type(feature).__name__], checkpoint.tensors)


def _check_same_recipe(run: RunDirectory, config: Config) -> None:
    """Raises `TrimtabError` if keys that affect results have changed."""
    saved = parse_config(parse_toml(run.config_toml), str(run.path / CONFIG))
    # `SyncSource` saves the engine's weights, already quantized; `AsyncSource` would quantize them again.
    continues = config.has_engine_threads and not config.engine.changes_weights
    moved = saved.placement != config.placement and saved.has_engine_threads != config.has_engine_threads
    if moved and not continues:
        raise TrimtabError(
            f"{run.path} cannot go on elsewhere (docs/scale.md says which runs can): resume it with placement = "
            f"{saved.placement!r}"
        )
    refuse_other(saved, config, run.path)
    old, new = _result_affecting_keys(saved), _result_affecting_keys(config)
    changed = [f"{key} = {new.get(key)!r}" for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    if changed:
        raise TrimtabError(
            f"{run.path} was started with another recipe (now: {'; '.join(changed[:3])}): resume with the recipe and "
            "overrides of its config.toml, or choose another --out"
        )


def _result_affecting_keys(config: Config) -> dict[str, Any]:
    """Returns dotted keys and values that affect results. `trainer.steps` does only under the cosine schedule."""
    free: dict[str, Any] = dict.fromkeys(KEYS_FREE_TO_CHANGE, True)
    free["engine"] = {"hang_timeout": True, "server": {"urls", "timeout", "reconnect_timeout", "concurrency", "folder"}}
    data = config.model_dump(mode="json", exclude=free)
    del data["trainer"]["max_idle_steps"]
    if config.optim.schedule != "cosine":
        del data["trainer"]["steps"]
    return flatten(data)
