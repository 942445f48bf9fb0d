from __future__ import annotations

import pytest
import torch

from trimtab.trainer.config import OptimConfig
from trimtab.trainer.optim import NonFiniteUpdateError, build_optimizer, check_weights, learning_rate, linear_decay
from trimtab.trainer.ranks import current_ranks
from trimtab.trainer.seeds import derive


def test_warm_up_then_constant() -> None:
    config = OptimConfig(lr=1.0, warmup=4)
    assert [learning_rate(config, update, 10) for update in (0, 1, 3, 4, 9)] == [0.25, 0.5, 1.0, 1.0, 1.0]


def test_cosine_ends_at_its_floor() -> None:
    config = OptimConfig(lr=1.0, warmup=2, schedule="cosine", min_lr=0.2)
    assert learning_rate(config, 2, 12) == 1.0
    assert learning_rate(config, 7, 12) == pytest.approx(0.6)
    assert learning_rate(config, 12, 12) == pytest.approx(0.2)
    assert learning_rate(config, 99, 12) == pytest.approx(0.2)


def test_linear_decay_from_an_update_to_the_last() -> None:
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
