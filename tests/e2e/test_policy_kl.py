"""`update/policy_kl`: how far the updates of a step moved the policy, against two scorings of the same tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.run_results import untimed

from trimtab.runs.directory import read_metrics
from trimtab.trainer import run
from trimtab.trainer.config import Config, load_config
from trimtab.trainer.features import build_features
from trimtab.trainer.features.feature import Feature, PolicyLearner
from trimtab.trainer.models.logprobs import score
from trimtab.trainer.packing import MiniBatch

pytestmark = pytest.mark.e2e

SMALL = ("trainer.steps=4", "trainer.prompts=4", "trainer.samples=4", "eval.problems=2", "eval.every=0")
FAST = ("optim.lr=1e-3", "optim.warmup=0", "trainer.micro_batch_tokens=128", "diagnose.every=2")


class Rescored(Feature):
    """Scores the last mini-batch before and after the updates by itself, in float64, and keeps the mean of k3."""

    def __init__(self) -> None:
        self.expected: list[float] = []
        self._given: list[tuple[Any, torch.Tensor]] = []

    @torch.no_grad()
    def before_updates(self, learner: PolicyLearner, batches: Sequence[MiniBatch], step: int) -> None:  # noqa: ARG002
        self._given = [(micro, score(learner.model, micro.tokens).logp) for micro in batches[-1]]  # pyright: ignore

    @torch.no_grad()
    def after_updates(self, learner: PolicyLearner) -> Mapping[str, int]:
        total, count = 0.0, 0
        for micro, before in self._given:
            after = score(learner.model, micro.tokens).logp  # pyright: ignore
            for new, old in zip(after[micro.mask].tolist(), before[micro.mask].tolist(), strict=True):
                total, count = total + math.exp(new - old) - 1 - (new - old), count + 1
        self.expected.append(total / count)
        return {}


@contextmanager
def rescored(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rescored]:
    feature = Rescored()
    with monkeypatch.context() as patch:
        patch.setattr(run, "build_features", lambda *given: [*build_features(*given), feature])
        yield feature


def recipe(name: str, *overrides: str) -> Config:
    return load_config("laboratory", [f"objective.name={name}", *SMALL, *FAST, *overrides])


def measured(folder: Path) -> list[float | None]:
    return [row.get("update/policy_kl") for row in read_metrics(folder / "metrics.jsonl")]


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("token-tis", ("trainer.minibatches=2",)),  # with a proximal pass
        ("token-tis", ("trainer.minibatches=1",)),  # without: it is the current policy
        ("token-bypass", ("trainer.minibatches=2", "trainer.epochs=2")),  # over the sampler
        ("token-alp", ("trainer.minibatches=2", "perturbation.std=0.1")),  # updates of a perturbed policy
    ],
)
def test_it_is_the_mean_of_k3_between_two_scorings(
    name: str, overrides: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rescored(monkeypatch) as feature:
        run.train(recipe(name, *overrides), out=tmp_path / "run")
    values = measured(tmp_path / "run")
    assert [value is not None for value in values] == [False, True, False, True]
    for value, expected in zip(values, feature.expected, strict=True):
        assert value is None or value == pytest.approx(expected, rel=1e-3)
    assert min(feature.expected) > 1e-6


def test_measuring_changes_no_other_number(tmp_path: Path) -> None:
    """The same run with other probe steps: equal but for the metric and the time."""
    rows = []
    for every in (1, 1000):
        run.train(recipe("token-bypass", "trainer.minibatches=2", f"diagnose.every={every}"), out=tmp_path / str(every))
        rows.append(read_metrics(tmp_path / str(every) / "metrics.jsonl"))
    assert untimed(tmp_path / "1", "update/policy_kl") == untimed(tmp_path / "1000", "update/policy_kl")
    assert [sum("update/policy_kl" in row for row in one) for one in rows] == [4, 0]
