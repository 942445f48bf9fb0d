"""Captures the state of a run for a checkpoint, and restores it bit for bit."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from trimtab.config import Config, parse_config
from trimtab.engines.factory import weight_quantization
from trimtab.errors import TrimtabError
from trimtab.rollout.canary import Canary
from trimtab.rollout.source import RolloutSource
from trimtab.runs import atomic
from trimtab.runs.directory import RunDirectory
from trimtab.runs.layout import CONFIG
from trimtab.training.checkpoint import state_tensors, store
from trimtab.training.custom_objective import refuse_other
from trimtab.training.features.calibration import adopt
from trimtab.training.features.length_surge import LengthSurge
from trimtab.training.idle import Idle
from trimtab.training.learner import Learner
from trimtab.training.observer import Observer
from trimtab.training.refusals import is_async

FREE = ("out", "description", "threads", "eval", "diagnose", "checkpoint", "log", "compare")
FREE += ("placement", "ray", "sharding")


class Resumable(Protocol):
    """What of a trainer a checkpoint holds, and what a resumed one must do."""

    config: Config
    feed: RolloutSource
    learner: Learner
    run: RunDirectory
    observer: Observer
    surge: LengthSurge | None
    canary: Canary | None
    idle: Idle
    step: int

    def publish_now(self) -> None: ...

    def mark_best(self, measured: Mapping[str, float]) -> None: ...


def take(trainer: Resumable, measured: Mapping[str, float]) -> tuple[dict[str, Any], dict[str, Any], dict[str, bytes]]:
    """Tensors by section, JSON, and files; `measured` is what was evaluated at this step."""
    learner = trainer.learner
    optimizer, groups = state_tensors.optimizer_state(learner.optimizer, learner.trained)
    generators, generator_data = state_tensors.pack(state_tensors.rng_state())
    fed, feed_data, files = trainer.feed.state(learner.updates)
    tensors = {"model": state_tensors.model_state(learner.model), "optimizer": optimizer, "random": generators, **fed}
    if learner.perturbation is not None:
        tensors["perturbation"] = state_tensors.model_state(learner.perturbation)
    meta = {
        "step": trainer.step,
        "measured": dict(measured),
        "updates": learner.updates,
        "bad_in_a_row": learner.bad_in_a_row,
        "idle": trainer.idle.steps,
        "feed": feed_data,
        "prompts": trainer.feed.collector.stream.state(),
        "optimizer": groups,
        "random": generator_data,
    }
    if trainer.surge is not None:
        meta["surge"] = trainer.surge.state()
    if learner.bounds is not None:
        meta["bounds"] = learner.bounds
    if trainer.canary is not None:
        meta["canary"] = trainer.canary.noise
    return tensors, meta, files


def resume(trainer: Resumable) -> None:
    """Continue from the newest intact checkpoint; a run killed before its first one starts over in its directory."""
    run = trainer.run
    _check_same_recipe(run, trainer.config)
    found = store.latest(run.checkpoint_root, notify=trainer.observer.message)
    if found is None:
        run.truncate_after(-1)
        trainer.observer.message(f"no checkpoint in {run.path} yet: starting from the beginning")
        return
    run.truncate_after(found.step)
    _restore(trainer, found)
    trainer.mark_best(found.meta["measured"])  # a kill between saving and marking would otherwise lose the mark
    trainer.observer.message(f"resumed from {found.folder}")


def _restore(trainer: Resumable, found: store.LoadedCheckpoint) -> None:
    learner, meta = trainer.learner, found.meta
    state_tensors.load_model_state(learner.model, found.tensors["model"])
    if learner.perturbation is not None:
        state_tensors.load_model_state(learner.perturbation, found.tensors["perturbation"])
    state_tensors.load_optimizer_state(
        learner.optimizer, learner.trained, found.tensors["optimizer"], meta["optimizer"]
    )
    state_tensors.set_rng_state(state_tensors.unpack(found.tensors["random"], meta["random"]))
    trainer.step = meta["step"]
    learner.updates = meta["updates"]
    learner.bad_in_a_row = meta["bad_in_a_row"]
    trainer.idle.steps = meta.get("idle", 0)  # checkpoints of before it was counted have none
    if "bounds" in meta:
        adopt(learner, meta["bounds"])
    if trainer.surge is not None:
        trainer.surge.restore(meta["surge"])
    if trainer.canary is not None:
        trainer.canary.noise = meta["canary"]
    trainer.feed.collector.stream.restore(meta["prompts"])
    if "engine" not in found.tensors:
        trainer.publish_now()
    trainer.feed.restore(found.tensors, meta["feed"], found.files)


def _check_same_recipe(run: RunDirectory, config: Config) -> None:
    """What decides the numbers must be as it was; how long to train and what to log may change, and is written down."""
    saved = parse_config(tomllib.loads(run.config_toml), str(run.path / CONFIG))
    if saved.placement != config.placement and not _movable(saved, config):
        raise TrimtabError(
            f"{run.path} cannot go on elsewhere (docs/ray.md says which runs can): resume it with placement = "
            f"{saved.placement!r}"
        )
    refuse_other(saved, config, run.path)
    old, new = _deciding(saved), _deciding(config)
    changed = [f"{key} = {new.get(key)!r}" for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    if changed:
        raise TrimtabError(
            f"{run.path} was started with another recipe (now: {'; '.join(changed[:3])}): resume with the recipe and "
            "overrides of its config.toml, or choose another --out"
        )
    if run.writes:
        atomic.write_text(run.path / CONFIG, config.dump())


def _movable(saved: Config, config: Config) -> bool:
    """Whether the checkpoints of one placement hold what the other needs."""
    if is_async(saved) == is_async(config):
        return True
    # Engines in step save their weights as they round them: engines beside the trainer would round them again.
    return is_async(config) and not weight_quantization(config).active


def _deciding(config: Config) -> dict[str, Any]:
    """Dotted keys that decide a run's numbers: not where it runs, and how long only where the schedule asks."""
    free: dict[str, Any] = dict.fromkeys(FREE, True)
    free["engine"] = {"patience": True, "server": {"urls", "timeout", "patience", "concurrency", "folder"}}
    data = config.model_dump(mode="json", exclude=free)
    del data["trainer"]["max_idle_steps"]
    if config.optim.schedule != "cosine":
        del data["trainer"]["steps"]
    return dict(_flat(data, ""))


def _flat(data: Mapping[str, Any], place: str) -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{place}{key}.")
        else:
            yield f"{place}{key}", value
