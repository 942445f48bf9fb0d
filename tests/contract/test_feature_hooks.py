"""When training calls the hooks of a feature, and what it does with the values they return."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trimtab.runs.directory import read_metrics
from trimtab.runs.layout import checkpoint_folder
from trimtab.trainer import run
from trimtab.trainer.checkpoint import store
from trimtab.trainer.config import load_config
from trimtab.trainer.features.feature import (
    Feature,
    ForwardPass,
    PolicyLearner,
    ProximalPass,
    Sections,
    StepRecord,
    TrainedModule,
)
from trimtab.trainer.models.logprobs import TokenScores
from trimtab.trainer.packing import MicroBatch, MiniBatch
from trimtab.types import Trajectory

pytestmark = pytest.mark.e2e  # it trains


class CountingFeature(Feature):
    """Counts the calls of its hooks, and passes on a mark from each hook to the next one that sees its result."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.scale = nn.Linear(1, 1, bias=False)
        self.steps_before = self.steps_loaded = 0
        self._probes = False

    @property
    def probes(self) -> bool:
        return self._probes

    def modules(self) -> Mapping[str, TrainedModule]:
        return {"counting": TrainedModule(self.scale, 0.5)}

    def pack(self, micro: MicroBatch, trajectories: Sequence[Trajectory]) -> MicroBatch:
        assert len(trajectories) == len(micro.rows)
        self.calls["pack"] += 1
        return micro.with_extras(packed=len(trajectories))

    def proximal_passes(self, batch: MiniBatch, updates: int) -> Iterator[ProximalPass]:
        assert batch[0].extras["packed"]
        assert updates == self.calls["end_update"] + 2 * self.steps_before
        self.calls["proximal_passes"] += 1
        yield ProximalPass()

    @contextmanager
    def forward(self, call: ForwardPass) -> Iterator[Mapping[str, Any]]:
        assert call.micro.extras["packed"] == len(call.micro.rows)
        self.calls[f"forward {call.purpose}"] += 1
        yield {"kept": None}

    def after_score(self, call: ForwardPass, scores: TokenScores) -> MicroBatch:
        assert scores.logp.shape == call.micro.mask.shape
        self.calls[f"scored {call.purpose}"] += 1
        if call.purpose == "train":
            assert call.micro.extras["from_proximal"] == "proximal"
        return call.micro.with_extras(**{f"from_{call.purpose}": call.purpose})

    def before_updates(self, learner: PolicyLearner, batches: Sequence[MiniBatch], step: int) -> None:
        assert learner.objective.name == "token-tis"
        assert all(micro.advantage.isfinite().all() for batch in batches for micro in batch)
        self.calls["before_updates"] += 1
        self._probes = step == 2

    def end_update(self) -> None:
        self.calls["end_update"] += 1

    def after_updates(self, learner: PolicyLearner) -> Mapping[str, int]:
        self.calls["after_updates"] += 1
        assert learner.objective.name == "token-tis"
        assert self.calls["end_update"] == 2 * self.calls["after_updates"]
        return {"counting/updates": self.calls["end_update"]}

    def end_step(self, record: StepRecord) -> Mapping[str, float]:
        assert len(record.trajectories) == 16
        self.calls["end_step"] += 1
        return {"counting/updates": record.statistics.counts["counting/updates"], "counting/before": self.steps_before}

    def publish_options(self, model: nn.Module, version: int) -> Mapping[str, Any]:
        assert any(parameter.requires_grad for parameter in model.parameters())
        self.calls[f"publish {version}"] += 1
        return {"expected": None}

    def state(self) -> Mapping[str, Any]:
        return {"step": 100 + self.steps_before + self.calls["end_step"]}

    def tensors(self) -> Sections:
        return {"counted": {"steps": torch.tensor(self.steps_before + self.calls["end_step"])}}

    def load_state(self, learner: PolicyLearner, saved: Mapping[str, Any], sections: Sections) -> None:
        self.steps_loaded = int(sections["counted"]["steps"])
        assert learner.objective.name == "token-tis"
        self.steps_before = saved["step"] - 100


def train(steps: int, out: Path, monkeypatch: pytest.MonkeyPatch, *, resume: bool = False) -> CountingFeature:
    """With two mini-batches of one micro-batch a step, so that the proximal policy has a forward of its own."""
    feature = CountingFeature()
    monkeypatch.setattr(run, "build_features", lambda *_: [feature])
    small = ["prompts=4", "samples=4", "minibatches=2", "micro_batch_tokens=100000"]
    sets = [f"trainer.steps={steps}", *(f"trainer.{item}" for item in small), "eval.problems=2", "eval.every=0"]
    recipe = load_config("laboratory", [*sets, "checkpoint.every=1", "checkpoint.keep=9", "optim.warmup=0"])
    run.train(recipe, out=out, resume=resume)
    return feature


def test_hooks_are_called_where_the_interface_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    feature = train(2, tmp_path / "run", monkeypatch)
    assert feature.calls == {
        "pack": 4,
        "proximal_passes": 4,
        "forward proximal": 4,
        "scored proximal": 4,
        "before_updates": 2,
        "forward train": 4,
        "scored train": 4,
        "forward probe": 2,  # in the second step
        "scored probe": 2,
        "end_update": 4,
        "after_updates": 2,
        "end_step": 2,
        "publish 0": 1,
        "publish 2": 1,
        "publish 4": 1,
    }
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["counting/updates"] for row in rows] == [2, 4]


def test_state_and_modules_are_saved_and_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = train(1, tmp_path / "run", monkeypatch)
    saved = store.load(checkpoint_folder(tmp_path / "run" / "checkpoints", 1))
    assert saved.meta["features"] == {"CountingFeature": {"step": 101}}
    assert torch.equal(saved.tensors["counting"]["weight"], first.scale.weight)
    groups = json.dumps(saved.meta["optimizer"][1])
    assert '"counting.weight"' in groups
    assert '"lr": 0.5' in groups
    second = train(2, tmp_path / "run", monkeypatch, resume=True)
    assert second.steps_loaded == 1
    assert torch.equal(second.scale.weight, first.scale.weight)
    assert [row["counting/before"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [0, 1]
