"""A run whose sampler is rounded: resumed it is the uninterrupted run, and it is judged by its clean weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from trimtab.trainer import evaluation, rewards, tasks
from trimtab.trainer.checkpoint import store
from trimtab.trainer.config import Config, load_config
from trimtab.trainer.engines.embedded.embedded_engine import EmbeddedEngine
from trimtab.trainer.export import export
from trimtab.trainer.models.load import load
from trimtab.trainer.run import train
from trimtab.types import SamplingParams

pytestmark = pytest.mark.e2e

SMALL = ("trainer.prompts=4", "trainer.samples=4", "optim.lr=1e-3", "eval.every=2", "eval.problems=32")
# The sampler lags at the checkpoint in the first, and was refreshed right before it in the second.
SAMPLERS = {
    "int3-noise-stale": ("engine.quantize=int3", "engine.noise=0.1", "trainer.sync_every=2", "model.path=laboratory"),
    "noise-moe-bf16": ("engine.noise=0.1", "engine.dtype=bfloat16", "model.path=laboratory-moe"),
}


def recipe(name: str, steps: int) -> Config:
    return load_config("laboratory", (*SMALL, *SAMPLERS[name], f"trainer.steps={steps}"))


def tensors(run: Path) -> dict[str, torch.Tensor]:
    newest = store.latest(run / "checkpoints")
    assert newest is not None
    return {f"{part}/{key}": tensor for part, named in newest.tensors.items() for key, tensor in named.items()}


@pytest.mark.parametrize("name", SAMPLERS)
def test_stopped_and_resumed_equals_uninterrupted(name: str, tmp_path: Path) -> None:
    train(recipe(name, 3), out=tmp_path / "half")
    resumed = train(recipe(name, 5), out=tmp_path / "half", resume=True).metrics
    whole = train(recipe(name, 5), out=tmp_path / "whole").metrics
    continued, uninterrupted = tensors(tmp_path / "half"), tensors(tmp_path / "whole")
    assert any(key.startswith("engine/") for key in uninterrupted) == ("stale" in name)
    assert continued.keys() == uninterrupted.keys()
    assert not [key for key in uninterrupted if not torch.equal(continued[key], uninterrupted[key])]
    assert _numbers(resumed) == _numbers(whole)
    assert whole["mismatch/k3"] > 1e-5


def _numbers(metrics: dict[str, Any]) -> dict[str, Any]:
    timed = ("time/", "tokens_per_second/", "memory/")
    return {key: value for key, value in metrics.items() if not key.startswith(timed)}


def test_training_reports_the_accuracy_of_the_clean_policy(tmp_path: Path) -> None:
    """The accuracy a rounded run reports is that of its exported weights in an engine that rounds nothing."""
    config = load_config("laboratory", (*SMALL, "engine.quantize=int3", "trainer.steps=2", "eval.problems=128"))
    reported = train(config, out=tmp_path / "run").metrics["eval/sort/greedy"]
    loaded = load(str(export(tmp_path / "run", tmp_path / "model", "last")), dtype=torch.float32)
    task = tasks.build("sort")
    engine = EmbeddedEngine(loaded.model, loaded.tokenizer, "float32")
    with rewards.build([], task) as scorer:
        result = evaluation.evaluate(
            engine,
            loaded.tokenizer,
            task,
            scorer,
            problems=list(task.test[:128]),
            sampling=SamplingParams(temperature=0.0, max_tokens=task.max_tokens, stop=task.stop),
            seed=0,
        )
    assert reported == result.accuracy
