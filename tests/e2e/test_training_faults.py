"""Things that go wrong in a run: each ends in one clear line, and nothing that was saved is lost."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tests.support.run_results import Messages
from torch import Tensor

from trimtab.errors import TrimtabError
from trimtab.report.health import health
from trimtab.runs.directory import read_metrics
from trimtab.runs.layout import list_checkpoints
from trimtab.runs.reader import read_run
from trimtab.trainer.checkpoint import store
from trimtab.trainer.config import Config, load_config
from trimtab.trainer.engines.factory import build_engines
from trimtab.trainer.models.perturbation import Perturbation
from trimtab.trainer.run import train

pytestmark = pytest.mark.e2e

SMALL = ("trainer.steps=4", "trainer.prompts=2", "trainer.samples=4", "eval.problems=4", "checkpoint.every=1")


def recipe(*overrides: str) -> Config:
    config = load_config("quickstart-stale", (*SMALL, "trainer.sync_every=1", *overrides))
    return config.model_copy(update={"compare": None})


def test_divergence_stops_with_the_last_good_checkpoint(tmp_path: Path) -> None:
    # A learning rate this large overflows the weights at the first update; from then on every loss is NaN.
    # The sampler keeps its first weights all along: it would refuse the broken ones.
    config = recipe("optim.lr=1e30", "optim.warmup=0", "trainer.steps=9", "trainer.sync_every=9", "checkpoint.every=9")
    with pytest.raises(TrimtabError, match=r"3 updates in a row were not finite.*last good checkpoint"):
        train(config, out=tmp_path / "run")
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["optim/skipped"] for row in rows] == [0] * (len(rows) - 2) + [1, 1]
    assert_finite(tmp_path / "run")
    verdict = health(read_run(tmp_path / "run"))
    assert verdict.state == "not healthy"
    assert "it ended with an error (3 updates in a row were not finite" in verdict.text


def test_an_engine_that_was_started_is_closed_if_the_run_cannot_start(tmp_path: Path) -> None:
    built: list[Any] = []  # kept, as a notebook keeps what is in the traceback of the last error

    def engines(config: Config, *rest: Any) -> list[Any]:
        built.extend(build_engines(config, *rest))
        return built

    # The context is read after the engines were started, since they may know a smaller one.
    config = recipe("engine.workers=2", "sampling.max_tokens=100000")
    with pytest.raises(TrimtabError, match="leaves no room for a prompt"):
        train(config, out=tmp_path / "run", engines=engines)
    assert [psutil.pid_exists(engine.transport.pid) for engine in built] == [False, False]


def test_weights_that_overflow_are_never_saved(tmp_path: Path) -> None:
    config = recipe("optim.lr=1e38", "optim.warmup=2", "trainer.steps=9", "trainer.sync_every=9")
    with pytest.raises(TrimtabError, match="made the weights non-finite"):
        train(config, out=tmp_path / "run")
    for _ in list_checkpoints(tmp_path / "run" / "checkpoints"):
        assert_finite(tmp_path / "run")


def noisy(*overrides: str) -> Config:
    return recipe("objective.name=token-alp", "trainer.steps=9", *overrides)


def gradient_becomes(monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor], Tensor]) -> None:
    """Plant a fault: what the optimizer sees as the gradient of every layer's log sigma."""
    build = Perturbation.__init__

    def planted(self: Perturbation, *args: Any, **keywords: Any) -> None:
        build(self, *args, **keywords)
        self.log_sigma.register_hook(change)

    monkeypatch.setattr(Perturbation, "__init__", planted)


def test_a_perturbation_that_diverges_stops_as_a_model_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # log sigma starts at log 1e-4 = -9.21. Adam, whose gradient is always the same, adds the learning rate, 1, in every
    # update: 18 of them lead to 8.79, the next one beyond log 1e4 = 9.21.
    gradient_becomes(monkeypatch, lambda gradient: torch.full_like(gradient, -1.0))
    config = noisy("perturbation.lr=1", "optim.warmup=0", "trainer.steps=30")
    with pytest.raises(TrimtabError, match=r"deviation larger than 10000; .*last good checkpoint.*perturbation\.lr"):
        train(config, out=tmp_path / "run")
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert len(rows) == 18
    assert rows[-1]["perturbation/sigma_mean"] == pytest.approx(1e-4 * math.exp(18), rel=1e-3)
    assert rows[-1]["perturbation/sigma_drift"] == pytest.approx(math.exp(18) - 1, rel=1e-3)
    layers = sum(key.startswith("perturbation/sigma/") for key in rows[-1])
    assert rows[-1]["perturbation/grad_norm"] == pytest.approx(layers**0.5)
    assert_finite(tmp_path / "run")


def test_a_gradient_of_the_noise_that_is_not_finite_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gradient_becomes(monkeypatch, lambda gradient: gradient * math.inf)
    with pytest.raises(TrimtabError, match=r"3 updates in a row were not finite.*perturbation"):
        train(noisy(), out=tmp_path / "run")
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["optim/skipped"] for row in rows] == [1, 1]
    assert [row["perturbation/sigma_mean"] for row in rows] == pytest.approx([1e-4, 1e-4])
    assert_finite(tmp_path / "run")


def assert_finite(run: Path) -> None:
    saved = store.latest(run / "checkpoints")
    assert saved is not None
    assert all(torch.isfinite(weight).all() for part in saved.tensors.values() for weight in part.values())


def test_a_failing_reward_costs_its_sample_and_is_counted(tmp_path: Path) -> None:
    calls = "trimtab_test_reward"
    (tmp_path / f"{calls}.py").write_text(
        "def reward(completion, problem):\n"
        "    if completion.startswith('0'):\n"
        "        raise RuntimeError('no zeros please')\n"
        "    return float(len(set(completion)))\n"
    )
    sys.path.insert(0, str(tmp_path))
    notes = Messages()
    config = recipe("trainer.prompts=8", "trainer.steps=2")
    data = config.model_dump(exclude_none=True) | {"reward": [{"name": f"{calls}:reward"}]}
    train(load_config(data), out=tmp_path / "run", observer=notes)
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert sum(row["reward/failed"] for row in rows) > 0
    assert all(row["trajectories/consumed"] + row["trajectories/dropped"] == 32 for row in rows)
    assert any("no zeros please" in line for line in notes.lines)


def test_the_kl_anchor_is_the_initial_model(tmp_path: Path) -> None:
    config = recipe("objective.kl=unbiased", "objective.kl_coef=0.1", "trainer.steps=3", "optim.lr=1e-3")
    train(config, out=tmp_path / "run")
    kl = [row["kl/mean"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert kl[0] == pytest.approx(0.0, abs=1e-6)
    assert kl[-1] > kl[0]
