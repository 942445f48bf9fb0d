"""One update: its rate, its step by hand, and that it is skipped when its loss or its gradient is not finite."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch

from trimtab.objectives import objective
from trimtab.objectives.objective import Output
from trimtab.trainer import batch_preparation, sft, tasks
from trimtab.trainer.batch_preparation import prepare_batch
from trimtab.trainer.config import Config, OptimConfig, load_config
from trimtab.trainer.learner import Learner
from trimtab.trainer.models.laboratory import build
from trimtab.trainer.observer import NullObserver
from trimtab.trainer.optim import NonFiniteUpdateError, build_optimizer, check_weights, learning_rate, linear_decay
from trimtab.trainer.ranks import current_ranks
from trimtab.trainer.seeds import derive
from trimtab.types import Completion, SamplingParams, Trajectory

MODEL, TOKENIZER = build(0)
TASK = tasks.build("arithmetic")


class Planted:
    """The objective `name` with `added` on the loss of its first micro-batch, which leaves every gradient as it is."""

    def __init__(self, added: float) -> None:
        self._inner, self._added, self.calls = objective("grpo"), added, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(self, *args: Any, **keywords: Any) -> Output:
        out = self._inner(*args, **keywords)
        self.calls += 1
        return out._replace(loss=out.loss + self._added) if self.calls == 1 else out


def recipe(*overrides: str) -> Config:
    data = {"model": {"path": "laboratory", "autocast": "none"}, "objective": {"name": "grpo"}}
    sizes = ["trainer.prompts=1", "trainer.samples=4", "trainer.micro_batch_tokens=16", "trainer.max_bad_steps=2"]
    return load_config(data, [*sizes, *overrides])


def learner(planted: Planted) -> tuple[Learner, Any]:
    """A learner and a batch of four responses, each in a micro-batch of its own."""
    model = copy.deepcopy(MODEL)
    one: Any = Learner(recipe(), model, torch.optim.SGD(model.parameters(), lr=0.1), planted, total_updates=9)  # type: ignore[arg-type]
    return one, prepare_batch([rows()], one, pad_id=0).minibatches


def rows() -> list[Trajectory]:
    prompt, params = tasks.encode(TASK, TASK.train[0], TOKENIZER), SamplingParams(max_tokens=4)
    group = []
    for index in range(4):
        ids = np.array([1, 2, 3, index], dtype=np.int64)
        answer = Completion(ids, np.full(4, -2.5, np.float32), np.zeros(4, np.int64), "stop", "")
        group.append(Trajectory(prompt, 0, answer, params, np.ones(4, np.bool_), float(index % 2), {}))
    return group


def weights(one: Learner) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten().clone() for parameter in one.model.parameters()])


@pytest.mark.parametrize("added", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_beside_a_finite_gradient_is_skipped(added: float) -> None:
    one, batches = learner(planted := Planted(added))
    before = weights(one)
    stats = one.update(batches, lambda *_: None)
    assert planted.calls > 1, "the loss of one micro-batch among several is bad"
    assert (stats.skipped, stats.grad_norms, one.updates) == (1, [], 0)
    assert torch.equal(weights(one), before)
    planted.calls = 0
    with pytest.raises(NonFiniteUpdateError, match=rf"2 updates in a row were not finite \(loss {added:.4g}, gradient"):
        one.update(batches, lambda *_: None)
    assert torch.equal(weights(one), before)


def test_a_warm_start_stops_at_a_gradient_that_is_not_finite(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """A gradient of infinity beside a finite loss would make every weight NaN, and the next loss."""
    score = sft.score

    def steep(*args: Any) -> Any:
        scores = score(*args)
        scores.logp.register_hook(lambda gradient: gradient * math.inf)
        return scores

    monkeypatch.setattr(sft, "score", steep)
    config = recipe("sft.steps=2", "sft.batch=2")
    with pytest.raises(ValueError, match=r"sft step 1: the loss is \d.*, the gradient norm (nan|inf); lower sft.lr"):
        sft.supervised_warm_start(config, out=tmp_path / "model", observer=NullObserver())


def test_the_time_of_preparing_a_batch_includes_passes_that_dropped_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = learner(Planted(0.0))
    now, bad = iter([10.0, 13.0, 20.0]), iter([{0}, set[int]()])
    monkeypatch.setattr(batch_preparation.time, "perf_counter", lambda: next(now))
    monkeypatch.setattr(batch_preparation, "rows_with_non_finite_proximal", lambda _: next(bad))
    batch = prepare_batch([rows()], one, pad_id=0)
    assert (batch.dropped, batch.seconds) == (1, 10.0)


def test_schedules_by_hand() -> None:
    """A warm-up and then a constant; a cosine to its floor; a linear decay from an update to the last."""
    config = OptimConfig(lr=1.0, warmup=4)
    assert [learning_rate(config, update, 10) for update in (0, 1, 3, 4, 9)] == [0.25, 0.5, 1.0, 1.0, 1.0]
    config = OptimConfig(lr=1.0, warmup=2, schedule="cosine", min_lr=0.2)
    assert [learning_rate(config, update, 12) for update in (2, 7, 12, 99)] == pytest.approx([1.0, 0.6, 0.2, 0.2])
    assert [linear_decay(update, 2, 6) for update in (0, 2, 3, 5, 6, 9)] == [1.0, 1.0, 0.75, 0.25, 0.0, 0.0]


def test_one_adamw_step_by_hand() -> None:
    weight = torch.nn.Parameter(torch.tensor([1.0]))
    frozen = torch.nn.Parameter(torch.tensor([1.0]), requires_grad=False)
    optimizer = build_optimizer([weight, frozen], OptimConfig(lr=0.1, betas=(0.9, 0.99), weight_decay=0.5, eps=1e-8))
    weight.grad = torch.tensor([3.0])
    optimizer.step()
    # The first Adam step is lr * sign(grad); decoupled decay takes lr * wd * w.
    assert weight.item() == pytest.approx(1.0 - 0.1 * 0.5 - 0.1, abs=1e-6)
    assert len(optimizer.param_groups[0]["params"]) == 1


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite_are_refused_and_large_ones_are_not(bad: float) -> None:
    weights = [torch.nn.Parameter(torch.full((3,), 3e38))]
    check_weights(weights, current_ranks())  # their squares are infinite in float32
    weights[0].data[1] = bad
    with pytest.raises(NonFiniteUpdateError):
        check_weights(weights, current_ranks())


def test_seeds_differ_by_purpose_and_counter_and_repeat() -> None:
    seeds = {derive(0, "rollout", 0), derive(0, "rollout", 1), derive(1, "rollout", 0), derive(0, "eval", 0)}
    assert len(seeds) == 4
    assert derive(3, "rollout", 5) == derive(3, "rollout", 5)
    assert all(0 <= seed < 2**63 for seed in seeds)
