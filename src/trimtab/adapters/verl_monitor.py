"""Shows the batches of a verl run to a `trimtab.Monitor`: where TRIMTAB_MONITOR names a folder, `trimtab.adapters.verl`
puts this in place. verl's loss, weights and masks stay as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import numpy as np
import torch

from trimtab.adapters.hooks import prefixed_metrics
from trimtab.adapters.monitoring import opened
from trimtab.adapters.verl_dump import trainers, versions
from trimtab.corrections.reduce import nan_below_minimum

MONITOR = "TRIMTAB_MONITOR"


class Watch:
    """A monitor in the process of the driver, and the trainer there, of which it asks the number of the update."""

    def __init__(self, folder: str) -> None:
        self._monitor = functools.cache(lambda: opened(folder, merge_ranks=False))  # made where there is a batch
        self._trainer: Any = None
        self._tags: Sequence[dict[str, Any]] | None = None
        self._calls = count()

    def follow(self) -> None:
        """Wraps verl's trainers, so that updates and versions are known and the monitor is closed at the end."""
        for trainer, _ in trainers():
            trainer.fit = self._wrap_fit(trainer.fit)
            if hasattr(trainer, "_compute_advantage"):
                trainer._compute_advantage = self._wrap_advantage(trainer._compute_advantage)

    def _wrap_fit(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def fit(trainer: Any, *arguments: Any, **keywords: Any) -> Any:
            self._trainer = trainer
            result = original(trainer, *arguments, **keywords)
            self._monitor().close()
            return result

        return fit

    def _wrap_advantage(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps V1's method, in which the batch is shown: only there its tags are known."""

        @functools.wraps(original)
        def compute(trainer: Any, batch: Any, *arguments: Any, **keywords: Any) -> Any:
            self._tags = batch.tags
            return original(trainer, batch, *arguments, **keywords)

        return compute

    def wrap_correction(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps verl's `compute_rollout_correction_and_add_to_batch`, which sees each batch once."""

        @functools.wraps(original)
        def add_to_batch(batch: Any, rollout_corr_config: Any) -> tuple[Any, dict[str, Any]]:
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

        return add_to_batch

    def _time(self, batch: Any) -> tuple[int, list[int] | None]:
        """Returns the number of updates before this one, and of those behind each response where it is known."""
        if self._trainer is None:  # One of verl's experimental trainers, or the user's own loop.
            return next(self._calls), None
        size = len(batch.batch["response_mask"])
        if self._tags is None:
            oldest = batch.non_tensor_batch.get("min_global_steps", [None] * size)
        else:
            oldest = [tag.get("min_global_steps") for tag in self._tags]
        return self._trainer.global_steps - 1, versions(self._trainer, list(oldest))
