"""Records the log-probs of a verl run: writes them for `trimtab diagnose`, and shows them to a `trimtab.Monitor`.

If TRIMTAB_DUMP names a folder, tokens and log-probs of sampler and trainer are written there, under verl's names,
whenever verl writes the texts of its rollouts into `trainer.rollout_data_dir`. If TRIMTAB_MONITOR names a folder, the
monitor sees every batch. verl's loss, weights and masks do not change. Checked against V1 and v0 of verl 0.9.1.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import numpy as np
import torch

from trimtab.adapters.hooks import wrap
from trimtab.adapters.micro_batch import prefixed_metrics
from trimtab.adapters.recording import Dump, open_monitor, response_rows
from trimtab.corrections.reduce import nan_below_minimum
from trimtab.errors import TrimtabError

DUMP, MONITOR = "TRIMTAB_DUMP", "TRIMTAB_MONITOR"
NAMES = ("responses", "response_mask", "rollout_log_probs", "old_log_probs", "entropy", "advantages")
SETTINGS = "set actor_rollout_ref.rollout.calculate_log_probs=True and trainer.rollout_data_dir=DIR"
SYNCHRONOUS = ("RayPPOTrainer", "PPOTrainerSync")
"""Trainers that send their weights to the sampler before every generation."""


def install_dump(folder: str) -> None:
    """Makes verl's trainers write every batch into the folder."""
    dump = Dump(folder)
    for trainer, batch_rows in trainers():
        trainer._log_rollout_data = wrap(
            trainer._log_rollout_data, functools.partial(_write_rollouts, dump, batch_rows)
        )


def trainers() -> Iterator[tuple[Any, Callable[[Any, Any], Iterator[dict[str, Any]]]]]:
    """Yields verl's trainers v0 and V1, each with the function that reads its batches, if its packages are installed.

    Every process of a run loads the plugin, but only the driver needs these packages.
    """
    for name, trainer, batch_rows in (
        ("verl.trainer.ppo.ray_trainer", "RayPPOTrainer", v0_rows),
        ("verl.trainer.ppo.v1.trainer_base", "PPOTrainer", v1_rows),
    ):
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if str(error.name).partition(".")[0] == "verl":
                raise
        else:
            yield getattr(module, trainer), batch_rows


def _write_rollouts(
    dump: Dump,
    batch_rows: Callable[[Any, Any], Iterator[dict[str, Any]]],
    original: Callable[..., None],
    trainer: Any,
    batch: Any,
    *arguments: Any,
    **keywords: Any,
) -> None:
    """Writes a batch after verl's own `_log_rollout_data`. batch_rows: reads the batches of this trainer."""
    original(trainer, batch, *arguments, **keywords)
    written = list(batch_rows(trainer, batch))
    if any("rollout_log_probs" not in row for row in written):
        raise TrimtabError(f"{DUMP} needs the sampler's log-probs, which are not in verl's batch: {SETTINGS}")
    dump.write(trainer.global_steps, written)


def v1_rows(trainer: Any, batch: Any) -> Iterator[dict[str, Any]]:
    """Yields the responses of a V1 batch, whose tensors are in V1's queue, with the versions that generated them."""
    queue = importlib.import_module("transfer_queue")
    data = queue.kv_batch_get(
        keys=batch.keys, partition_id=batch.partition_id, select_fields=["uid", "rm_scores", *NAMES]
    )
    tokens = {name: [row.tolist() for row in data[name].unbind()] for name in NAMES if name in data.keys()}  # noqa: SIM118 - a TensorDict iterates over rows
    responses = {"uid": data["uid"].tolist(), "score": [row.sum().item() for row in data["rm_scores"].unbind()]}
    responses |= _versions(trainer, [tag.get("min_global_steps") for tag in batch.tags])
    length = torch.tensor([len(row) for row in tokens["responses"]])
    for row, tag in zip(response_rows(length, tokens, responses), batch.tags, strict=True):
        if not tag.get("is_padding", False):
            yield row


def v0_rows(trainer: Any, batch: Any) -> Iterator[dict[str, Any]]:
    """Yields the responses of a v0 batch, whose tensors are padded to one length after the prompts."""
    tensors = batch.batch
    tokens = {name: tensors[name] for name in NAMES if name in tensors.keys()}  # noqa: SIM118 - a TensorDict iterates over rows
    length = tensors["attention_mask"][:, -tensors["responses"].shape[1] :].sum(1)
    score = tensors["token_level_scores"].sum(-1)
    oldest = batch.non_tensor_batch.get("min_global_steps", [None] * len(length))
    responses = {"uid": batch.non_tensor_batch["uid"].tolist(), "score": score}
    yield from response_rows(length, tokens, responses | _versions(trainer, list(oldest)))


def versions(trainer: Any, oldest: Sequence[int | None]) -> list[int] | None:
    """Returns the number of steps that were completed when each response was begun, or None if it is not known.

    oldest: the version that the sampler's server reported for each response. verl's own asynchronous trainer counts
    publications of weights there, not steps, so the result is None.
    """
    if hasattr(trainer, "current_param_version"):
        return None
    known = [int(one) for one in oldest if one is not None]
    if len(known) == len(oldest):
        return known
    return [trainer.global_steps - 1] * len(oldest) if type(trainer).__name__ in SYNCHRONOUS else None


def _versions(trainer: Any, oldest: Sequence[int | None]) -> dict[str, list[int]]:
    if (known := versions(trainer, oldest)) is None:
        return {}
    return {"policy_version": known, "proximal_version": [trainer.global_steps - 1] * len(known)}


class Watch:
    """A monitor in the driver's process, which asks verl's trainer there for the number of the update."""

    def __init__(self, folder: str) -> None:
        self._monitor = functools.cache(lambda: open_monitor(folder, merge_ranks=False))  # created at the first batch
        self._trainer: Any = None
        self._tags: Sequence[dict[str, Any]] | None = None
        self._calls = count()

    def follow(self) -> None:
        """Wraps verl's trainers, so that updates and versions are known and the monitor is closed at the end."""
        for trainer, _ in trainers():
            trainer.fit = wrap(trainer.fit, self._fit)
            if hasattr(trainer, "_compute_advantage"):
                trainer._compute_advantage = wrap(trainer._compute_advantage, self._keep_tags)

    def _fit(self, original: Callable[..., Any], trainer: Any, *arguments: Any, **keywords: Any) -> Any:
        """Trains, and closes the monitor."""
        self._trainer = trainer
        result = original(trainer, *arguments, **keywords)
        self._monitor().close()
        return result

    def _keep_tags(
        self, original: Callable[..., Any], trainer: Any, batch: Any, *arguments: Any, **keywords: Any
    ) -> Any:
        """Stores the tags of a batch in V1's `_compute_advantage`, within which `observe` sees it without them."""
        self._tags = batch.tags
        return original(trainer, batch, *arguments, **keywords)

    def observe(self, original: Callable[..., Any], batch: Any, rollout_corr_config: Any) -> tuple[Any, dict[str, Any]]:
        """Shows a batch to the monitor in `compute_rollout_correction_and_add_to_batch`, which sees each batch once."""
        fields, group = batch.batch, batch.non_tensor_batch.get("uid")
        step, version = self._time(batch)
        observed = self._monitor().observe(
            logp_train=fields["old_log_probs"],
            logp_rollout=nan_below_minimum(fields["rollout_log_probs"]),
            mask=fields["response_mask"].bool(),
            step=step,
            version=None if version is None else torch.tensor(version),
            group=None if group is None else torch.from_numpy(np.unique(group.astype(str), return_inverse=True)[1]),
            reward=fields["token_level_scores"].sum(-1) if "token_level_scores" in fields else None,
        )
        batch, metrics = original(batch, rollout_corr_config)
        return batch, metrics | {f"rollout_corr/{key}": value for key, value in prefixed_metrics(observed).items()}

    def _time(self, batch: Any) -> tuple[int, list[int] | None]:
        """Returns the number of updates before this one, and before each response was begun; None if not known."""
        if self._trainer is None:  # One of verl's experimental trainers, or the user's own loop.
            return next(self._calls), None
        size = len(batch.batch["response_mask"])
        if self._tags is None:
            oldest = batch.non_tensor_batch.get("min_global_steps", [None] * size)
        else:
            oldest = [tag.get("min_global_steps") for tag in self._tags]
        return self._trainer.global_steps - 1, versions(self._trainer, list(oldest))
