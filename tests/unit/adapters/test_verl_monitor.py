"""The monitor of a verl run knows the update, the versions of the sampler's weights, and the end of the training."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.support.noisy_batch import ROWS, batch

from trimtab.adapters import verl_monitor

LAST = 4
Add = Callable[[Any, Any], Any]


def shown(step: int) -> Any:
    """A batch of verl's driver; the first response is one step old in step 3."""
    one = batch(step)
    fields = {"old_log_probs": one["logp_train"], "rollout_log_probs": one["logp_rollout"]}
    versions = [step - 1 - (step == 3), *[step - 1] * (ROWS - 1)]
    return SimpleNamespace(
        batch=fields | {"response_mask": one["mask"].long()},
        non_tensor_batch={"min_global_steps": np.array(versions, dtype=object)},
        tags=[{"min_global_steps": version} for version in versions],
    )


def v0(add: Add) -> Any:
    class RayPPOTrainer:
        def fit(self) -> str:
            for self.global_steps in range(1, LAST + 1):
                add(shown(self.global_steps), {})
            return "trained"

    return RayPPOTrainer


def v1(add: Add) -> Any:
    """Its tensors leave the queue without their tags."""

    class PPOTrainer:
        def fit(self) -> str:
            for self.global_steps in range(1, LAST + 1):
                self._compute_advantage(shown(self.global_steps), {})
            return "trained"

        def _compute_advantage(self, batch: Any, metrics: dict[str, float]) -> None:
            metrics.update(add(SimpleNamespace(batch=batch.batch, non_tensor_batch={}), {})[1])

    return PPOTrainer


@pytest.mark.parametrize("trainer", [v0, v1])
def test_updates_versions_and_the_end_are_those_of_the_trainer(
    trainer: Callable[[Add], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = verl_monitor.Watch(str(tmp_path))
    kind = trainer(watch.wrap_correction(lambda batch, _: (batch, {})))
    monkeypatch.setattr(verl_monitor, "trainers", lambda: [(kind, None)])
    watch.follow()
    assert kind().fit() == "trained"
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3]  # The last one is there once the monitor is closed.
    assert [row["age"] for row in rows] == pytest.approx([0, 0, 1 / ROWS, 0])
    sample = [json.loads(line) for line in (tmp_path / "sample.jsonl").open()]
    assert sum(row["policy_version"] != row["step"] for row in sample) == 1
