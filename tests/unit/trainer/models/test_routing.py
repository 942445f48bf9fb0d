"""Experts recorded and replayed: gates of each family, no change by the own choice, recomputation, and errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.unit.trainer.models.test_logprobs import PROMPT_INDEX, PROMPTS, RESPONSES, batch, build, gradients
from torch import Tensor

from trimtab.errors import TrimtabError
from trimtab.trainer.models.architecture import MIXTURES
from trimtab.trainer.models.logprobs import score
from trimtab.trainer.models.perturbation import Perturbation
from trimtab.trainer.models.routing import (
    RouterInfo,
    record_routing,
    replay_routing,
    router_info,
    routing_agreement,
)

BF16 = torch.bfloat16
KINDS = sorted(MIXTURES)
EXPERTS, CHOSEN, LAYERS = 4, 2, 2
# Softmax of these is (.1, .2, .3, .4).
SCORES = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()


def gates_of(model: Any) -> list[Any]:
    return [layer.mlp.gate for layer in model.model.layers]


def other(routes: Tensor) -> Tensor:
    """Every expert replaced by its neighbor: a choice as valid, and different."""
    return (routes + 1) % EXPERTS


def grads(model: Any, logp: Tensor) -> dict[str, Tensor]:
    return gradients(model, (logp * torch.linspace(-1, 2, logp.numel()).view_as(logp)).sum())


@contextmanager
def masked_routers(model: Any, chosen: Tensor) -> Iterator[None]:
    """The model's own routers, with the scores of all but the chosen experts at minus infinity."""
    for index, gate in enumerate(gates_of(model)):
        allowed = torch.zeros(len(chosen), EXPERTS).scatter_(1, chosen[:, index].long(), 1.0).bool()

        def forward(hidden: Tensor, gate: Any = gate, allowed: Tensor = allowed) -> tuple[Tensor, Tensor, Tensor]:
            scores = torch.nn.functional.linear(hidden, gate.weight).masked_fill(~allowed, -torch.inf)
            probabilities = scores.softmax(-1, dtype=torch.float32)
            top = probabilities.topk(CHOSEN, -1)
            return scores, top.values.to(scores.dtype), top.indices

        gate.forward = forward
    yield
    for gate in gates_of(model):
        del gate.forward


@pytest.mark.parametrize(
    ("kind", "change", "expected"),
    [
        ("mixtral", {}, [[1 / 3, 2 / 3], [0.75, 0.25], [4 / 7, 3 / 7]]),
        ("olmoe", {}, [[0.2, 0.4], [0.3, 0.1], [0.4, 0.3]]),
        ("olmoe", {"norm_topk_prob": True}, [[1 / 3, 2 / 3], [0.75, 0.25], [4 / 7, 3 / 7]]),
        ("qwen3_moe", {"norm_topk_prob": False}, [[0.2, 0.4], [0.3, 0.1], [0.4, 0.3]]),
        ("qwen3_moe", {"norm_topk_prob": True}, [[1 / 3, 2 / 3], [0.75, 0.25], [4 / 7, 3 / 7]]),
    ],
)
def test_gates_by_hand(kind: str, change: dict[str, Any], expected: list[list[float]]) -> None:
    """Softmax of all scores, then the chosen: with and without dividing by their sum."""
    model = build(kind, **change)
    hidden = torch.zeros(3, model.config.hidden_size)
    hidden[:, 0] = 1
    routes = torch.tensor([[1, 3], [2, 0], [3, 2]])[:, None].expand(-1, LAYERS, -1)
    with torch.no_grad(), replay_routing(model, routes):
        for gate in gates_of(model):
            gate.weight.zero_()
            gate.weight[:, 0] = SCORES
            scores, gates, chosen = gate(hidden)
            assert chosen.tolist() == [[1, 3], [2, 0], [3, 2]]
            assert torch.allclose(gates, torch.tensor(expected))
            assert torch.allclose(scores, SCORES.expand(3, -1))


@pytest.mark.parametrize("kind", KINDS)
def test_what_there_is_to_replay(kind: str) -> None:
    assert router_info(build(kind)) == RouterInfo(LAYERS, EXPERTS, CHOSEN)
    assert router_info(build("llama")) == RouterInfo(0, 0, 0)
    half = build("qwen3_moe", decoder_sparse_step=2)
    assert router_info(half) == RouterInfo(1, EXPERTS, CHOSEN)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dtype", "autocast", "checkpointing"),  # reentrant, not, or none
    [
        (torch.float32, False, None),
        (torch.float32, True, None),
        (BF16, False, None),
        (BF16, False, True),
        (BF16, False, False),
    ],
)
def test_replaying_the_models_own_choice_changes_no_bit(
    kind: str, dtype: torch.dtype, autocast: bool, checkpointing: bool | None
) -> None:
    model = build(kind, dtype=dtype)
    with torch.autocast("cpu", BF16, enabled=autocast):
        free = score(model, batch(), entropy=True, record=True)
    expected = grads(model, free.logp)
    if checkpointing is not None:
        model.train().gradient_checkpointing_enable({"use_reentrant": checkpointing})
    with torch.autocast("cpu", BF16, enabled=autocast):
        again = score(model, batch(), entropy=True, routes=free.routes, record=True)
    assert torch.equal(free.logp, again.logp)
    assert torch.equal(free.entropy, again.entropy)  # type: ignore[arg-type]
    assert torch.equal(free.routes, again.routes)  # type: ignore[arg-type]
    result = grads(model, again.logp)
    assert result.keys() == expected.keys()
    assert all(torch.equal(result[name], expected[name]) for name in expected)
    assert all(gate.weight.grad.abs().max() > 0 for gate in gates_of(model))


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_another_choice_is_what_a_router_without_the_rest_would_make(kind: str) -> None:
    """Softmax over all, chosen and renormalised, is the softmax of a router without other experts; gradients too."""
    changes: dict[str, Any] = {"norm_topk_prob": True} if kind == "qwen3_moe" else {}
    model = build(kind, **changes)
    free = score(model, batch(), record=True)
    routes = other(free.routes)  # type: ignore[arg-type]
    result = score(model, batch(), routes=routes)
    assert (result.logp - free.logp).abs().max() > 1e-3
    with masked_routers(model, routes):
        reference = score(model, batch()).logp
        expected_grads = grads(model, reference)
    assert torch.allclose(result.logp, reference, atol=1e-5)
    ours = grads(model, result.logp)
    assert ours.keys() == expected_grads.keys()
    for name, expected in expected_grads.items():
        assert (ours[name] - expected).abs().max() <= 1e-5 * expected.abs().max() + 1e-8, name
    assert all(ours[f"model.layers.{layer}.mlp.gate.weight"].abs().max() > 0 for layer in range(LAYERS))


def test_a_packed_row_records_what_each_response_alone_does() -> None:
    model = build("olmoe")
    routes = score(model, batch(), record=True).routes
    assert routes.dtype == torch.int16
    assert routing_agreement(routes, routes).tolist() == [42, 42]
    parts = routes.split([*map(len, PROMPTS), *(len(response) - 1 for response in RESPONSES)])
    for response, index, own in zip(RESPONSES, PROMPT_INDEX, parts[len(PROMPTS) :], strict=True):
        ids = PROMPTS[index] + response[:-1]
        with torch.no_grad(), record_routing(model) as tape:
            model(torch.tensor([ids]), use_cache=False)
        packed = torch.cat([parts[index], own])
        assert torch.equal(tape.take().sort(-1).values, packed.sort(-1).values)


def test_record_under_replay_is_the_routers_own_choice() -> None:
    """In the first layer nothing has happened yet: it is the free choice there, whatever is replayed."""
    model = build("qwen3_moe")
    free = score(model, batch(), record=True).routes
    own = score(model, batch(), routes=other(free), record=True).routes
    assert torch.equal(own[:, 0], free[:, 0])
    assert not torch.equal(own[:, 1], free[:, 1])


@pytest.mark.filterwarnings("ignore:The following:RuntimeWarning")  # peft, of the stacked experts it leaves out
@pytest.mark.parametrize(
    "targets",
    [{"target_modules": "all-linear"}, {"target_modules": [], "target_parameters": ["mlp.gate.weight"]}],
    ids=["everything", "router"],
)
def test_models_with_adapters_replay(targets: dict[str, Any]) -> None:
    """Where the router's own weight is adapted, it is wrapped, and still the one that is asked."""
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=2, task_type="CAUSAL_LM", **targets)
    model: Any = get_peft_model(build("qwen3_moe"), lora).get_base_model()
    assert router_info(model) == RouterInfo(LAYERS, EXPERTS, CHOSEN)
    free = score(model, batch(), record=True)
    again = score(model, batch(), routes=free.routes)
    assert torch.equal(free.logp, again.logp)
    assert (score(model, batch(), routes=other(free.routes)).logp - free.logp).abs().max() > 1e-3
    again.logp.sum().backward()
    trained = {name: p.grad for name, p in model.named_parameters() if p.requires_grad and "lora_B" in name}
    assert len([name for name in trained if "mlp.gate." in name]) == LAYERS
    assert all(grad is not None and grad.abs().max() > 0 for grad in trained.values())


def routes_of(tokens: int) -> Tensor:
    return torch.tensor((0, 1)).expand(tokens, LAYERS, -1).clone()


IDS = torch.tensor([[5, 9, 11, 7]])


def test_routes_of_another_batch_are_refused() -> None:
    model = build("qwen3_moe")
    routes = score(model, batch(), record=True).routes
    with pytest.raises(TrimtabError, match="routes of 20 tokens do not belong to this forward, which runs 21"):
        score(model, batch(), routes=routes[1:])


@pytest.mark.parametrize("checkpointing", [False, True])
def test_each_layer_runs_exactly_once(checkpointing: bool) -> None:
    model = build("mixtral").train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    with replay_routing(model, routes_of(4)):
        model(IDS)
        with pytest.raises(TrimtabError, match="layer 0 runs a second time"):
            model(IDS)
    with (
        pytest.raises(TrimtabError, match="mixture layers 0, 1 was never replayed"),
        replay_routing(model, routes_of(4)),
    ):
        pass
    with pytest.raises(ZeroDivisionError), replay_routing(model, routes_of(4)):  # not hidden by an error of replay
        raise ZeroDivisionError
    with torch.no_grad():
        free = model(IDS).logits
        with record_routing(model) as tape:
            assert torch.equal(model(IDS).logits, free)  # nothing stays behind
        assert len(tape.take()) == 4


def test_a_tape_is_cut_by_take() -> None:
    model = build("olmoe")
    with record_routing(model) as tape:
        assert tape.take().shape == (0, LAYERS, CHOSEN)
        model(IDS)
        first = tape.take()
        model(IDS[:, :3])
        model(IDS[:, :2])
    rest = tape.take()
    assert first.shape == (4, LAYERS, CHOSEN)
    assert torch.equal(rest, torch.cat([first[:3], first[:2]]))
    with record_routing(model) as tape:
        model.model.layers[0].mlp(torch.zeros(1, 5, model.config.hidden_size))
    with pytest.raises(TrimtabError, match=r"routing of \[0, 5\] tokens"):
        tape.take()


def test_agreement_by_hand() -> None:
    """Order does not matter."""
    one = torch.tensor([[[0, 1]], [[2, 3]], [[0, 2]]], dtype=torch.int16)
    two = torch.tensor([[[1, 0]], [[2, 1]], [[2, 0]]], dtype=torch.int16)
    assert routing_agreement(one, two).tolist() == [2, 3]
    assert routing_agreement(one, one).tolist() == [3, 3]


@torch.no_grad()
def free_routes(model: Any) -> Tensor:
    return score(model, batch(), record=True).routes


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
