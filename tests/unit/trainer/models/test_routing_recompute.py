"""Gradient checkpointing runs a layer again, later: with the routes of its own forward, whatever was replayed since."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.unit.trainer.models.test_logprobs import batch, build
from tests.unit.trainer.models.test_routing import BF16, KINDS, grads, other
from torch import Tensor

from trimtab.trainer.models.logprobs import score
from trimtab.trainer.models.perturbation import Perturbation
from trimtab.trainer.models.routing import record_routing, replay_routing

IDS = torch.tensor([[5, 9, 11, 7]])


def free_routes(model: Any) -> Tensor:
    with torch.no_grad():
        routes = score(model, batch(), record=True).routes
    assert routes is not None
    return routes


def checkpointed(model: Any, *, reentrant: bool = False) -> Any:
    model.train().gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model


def third(routes: Tensor) -> Tensor:
    return other(other(routes))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_backward_after_other_batches_uses_its_own_routes(kind: str, reentrant: bool) -> None:
    model = build(kind)
    own = other(free_routes(model))
    expected = grads(model, score(model, batch(), routes=own).logp)
    checkpointed(model, reentrant=reentrant)
    kept = score(model, batch(), routes=own).logp
    between = score(model, batch(), routes=third(own)).logp  # this one's backward never comes
    score(model, batch())
    gradients = grads(model, kept)
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)
    assert not torch.equal(between, kept)


def free(model: Any) -> Tensor:
    return model(IDS, use_cache=False).logits


def with_own(model: Any) -> Tensor:
    with replay_routing(model, torch.tensor([3, 1]).expand(4, 2, 2)):
        return model(IDS, use_cache=False).logits


@pytest.mark.parametrize("first", [free, with_own])
def test_a_backward_inside_another_replay_uses_its_own_routes(first: Callable[[Any], Tensor]) -> None:
    """The outer forward comes after: its routes are neither used up nor used by the recomputation."""
    model = build("qwen3_moe")
    expected = grads(model, first(model))
    with replay_routing(model, torch.tensor([2, 0]).expand(4, 2, 2)):
        later = free(model)
    checkpointed(model)
    logits = first(model)
    with replay_routing(model, torch.tensor([2, 0]).expand(4, 2, 2)):
        gradients = grads(model, logits)
        assert torch.equal(free(model), later)
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)


def test_a_recomputation_is_not_recorded() -> None:
    model = checkpointed(build("mixtral"))
    with record_routing(model) as tape:
        logits = free(model)
    logits.sum().backward()
    assert tape.take().shape == (4, 2, 2)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_replay_inside_a_perturbation(dtype: torch.dtype) -> None:
    """Both bind themselves to the checkpointed call; each finds its own on the way back."""
    model = build("qwen3_moe", dtype=dtype)
    own = other(free_routes(model))
    noise = Perturbation(model, std=0.05)

    def noisy(seed: int, routes: Tensor) -> Tensor:
        with noise.attached(seed=seed):
            return score(model, batch(), routes=routes).logp

    expected = grads(model, noisy(3, own))
    checkpointed(model)
    logp = noisy(3, own)
    noisy(4, third(own))
    gradients = grads(model, logp)
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)
