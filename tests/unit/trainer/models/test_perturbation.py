"""Noise on decoder layers: where it goes, its gradient, checkpointing, and that nothing stays on the model."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.unit.trainer.models.test_logprobs import assert_close_gradients, batch, build, gradients, rows
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointError
from transformers import T5Config, T5ForConditionalGeneration
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from trimtab.errors import TrimtabError
from trimtab.trainer.models import perturbed_layer
from trimtab.trainer.models.architecture import decoder_stack
from trimtab.trainer.models.families import FAMILIES
from trimtab.trainer.models.logprobs import score
from trimtab.trainer.models.noise import normals
from trimtab.trainer.models.perturbation import Perturbation

BF16 = torch.bfloat16


def loss(model: Any) -> Tensor:
    """Gives every token a different gradient."""
    logp = torch.cat(rows(score(model, batch()).logp))
    return (torch.linspace(-1, 2, len(logp), dtype=logp.dtype) * logp).sum()


@contextmanager
def inputs_of_layers(model: Any) -> Iterator[list[Tensor]]:
    """What each layer is given, seen before or after the noise: whichever context is the outer one comes first."""
    inputs: list[Tensor] = []
    hooks = [
        layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach().clone()))
        for layer in decoder_stack(model).layers
    ]
    yield inputs
    for hook in hooks:
        hook.remove()


def hooks(model: nn.Module) -> list[Any]:
    """Everything that an attachment could leave on a model."""
    modules = list(model.modules())
    return [
        [len(m._forward_pre_hooks) + len(m._forward_hooks) + len(m._backward_hooks) for m in modules],
        [{key: value for key, value in vars(m).items() if callable(value)} for m in modules],
    ]


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_every_layer_of_every_architecture_is_given_its_noise(kind: str) -> None:
    model = build(kind)
    perturbation = Perturbation(model, std=0.01)
    with torch.no_grad():
        perturbation.log_sigma += torch.tensor([0.0, 0.5])
    with inputs_of_layers(model) as clean, perturbation.attached(seed=3), inputs_of_layers(model) as noisy:
        loss(model)
    for layer, (before, after) in enumerate(zip(clean, noisy, strict=True)):
        noise = normals(tuple(before.shape), 3, (layer,), device=before.device, dtype=before.dtype)
        sigma = perturbation.sigmas()[str(layer)]
        assert (after - before - sigma * noise).abs().max() < 1e-5
    assert perturbation.sigmas() == pytest.approx({"0": 0.01, "1": 0.016487}, rel=1e-4)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_gradient_of_log_sigma_by_finite_differences(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Llama's own norm computes in float32 whatever the model's type is.
    exact = lambda norm, h: functional.rms_norm(h, norm.weight.shape, norm.weight, norm.variance_epsilon)  # noqa: E731
    monkeypatch.setattr(LlamaRMSNorm, "forward", exact)
    model = build(kind, dtype=torch.float64)
    perturbation = Perturbation(model, std=0.02).double()
    with perturbation.attached(seed=5):
        value = loss(model)
    value.backward()
    grad = perturbation.log_sigma.grad
    assert grad is not None
    assert grad.abs().min() > 1e-3
    for slot in range(2):
        values = []
        for step in (1e-4, -1e-4):
            moved = copy.deepcopy(perturbation.log_sigma.data)
            moved[slot] += step
            other = Perturbation(model, std=0.02).double()
            other.log_sigma.data = moved
            with other.attached(seed=5), torch.no_grad():
                values.append(loss(model).item())
        assert (values[0] - values[1]) / 2e-4 == pytest.approx(grad[slot].item(), rel=1e-5)


def test_hand_numbers_of_the_gradient() -> None:
    """One linear layer's worth: d(sum of c * (h + sigma eps)) / da = sigma * sum(c * eps)."""
    from trimtab.trainer.models.perturbation import _perturb

    log_sigma = torch.tensor(0.5).log().requires_grad_()
    hidden, weight = torch.zeros(2, 3, requires_grad=True), torch.arange(6.0).view(2, 3)
    out = _perturb(hidden, log_sigma=log_sigma, sigma=0.5, seed=1, layer=0)
    (weight * out).sum().backward()
    noise = normals((2, 3), 1, (0,), device=hidden.device, dtype=hidden.dtype)
    assert torch.allclose(out, 0.5 * noise)
    assert hidden.grad is not None
    assert torch.equal(hidden.grad, weight)
    assert log_sigma.grad is not None
    assert log_sigma.grad.item() == pytest.approx(0.5 * float((weight * noise).sum()), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("layers", ["all", "logits"])
def test_sigma_zero_equals_bypass_to_the_bit(dtype: torch.dtype, layers: str) -> None:
    model = build("llama", dtype=dtype)
    plain = loss(model)
    expected = gradients(model, plain)
    perturbation = Perturbation(model, layers, std=0.0)
    assert set(perturbation.sigmas().values()) == {0.0}
    with perturbation.attached(seed=1):
        value = loss(model)
        result = gradients(model, value)
    assert torch.equal(value, plain)
    assert all(torch.equal(result[name], grad) for name, grad in expected.items())
    assert perturbation.log_sigma.grad is None
    assert (perturbation.log_sigma == -torch.inf).all()


@pytest.mark.parametrize(("layers", "chosen"), [("1-2", ["1", "2"]), ("0", ["0"]), ("0-1,3", ["0", "1", "3"])])
def test_layers_outside_the_set_have_no_parameter_and_no_noise(layers: str, chosen: list[str]) -> None:
    model = build("llama", num_hidden_layers=4)
    perturbation = Perturbation(model, layers, std=0.1)
    assert list(perturbation.sigmas()) == chosen
    assert perturbation.log_sigma.shape == (len(chosen),)
    with inputs_of_layers(model) as clean, perturbation.attached(seed=1), inputs_of_layers(model) as noisy:
        loss(model).backward()
    changed = [str(i) for i in range(4) if not torch.equal(clean[i], noisy[i])]
    assert changed == chosen
    assert perturbation.log_sigma.grad is not None
    assert (perturbation.log_sigma.grad != 0).all()


def test_every_layer_has_its_own_standard_deviation_in_the_order_of_the_layers() -> None:
    """exp(log sigma) is the listed value, and the noise of a layer is that many times the standard normal draw."""
    model = build("llama", num_hidden_layers=4)
    perturbation = Perturbation(model, "2-3,0", std=[0.3, 0.0, 0.1])
    expected = {"2": 0.3, "3": 0.0, "0": 0.1}
    assert perturbation.sigmas() == pytest.approx(expected, rel=1e-6)
    with inputs_of_layers(model) as clean, perturbation.attached(seed=1), inputs_of_layers(model) as noisy:
        loss(model).backward()
    noise = normals(tuple(clean[0].shape), 1, (0,), device=clean[0].device, dtype=clean[0].dtype)
    assert (noisy[0] - clean[0] - 0.1 * noise).abs().max() < 1e-5
    assert perturbation.log_sigma.grad is not None
    assert [bool(value) for value in perturbation.log_sigma.grad] == [True, False, True]  # zero, and not NaN


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("inside", [True, False])
def test_checkpointing_gives_the_same_gradients(kind: str, dtype: torch.dtype, inside: bool) -> None:
    """Recomputation happens in the backward, inside the context or long after it, and draws the same noise."""
    model = build(kind, dtype=dtype).train()
    perturbation = Perturbation(model, std=0.1)

    def grads() -> dict[str, Tensor]:
        perturbation.zero_grad()
        with perturbation.attached(seed=1):
            value = loss(model)
            result = gradients(model, value) if inside else {}
        result = result or gradients(model, value)
        assert perturbation.log_sigma.grad is not None
        return {**result, "log_sigma": perturbation.log_sigma.grad.clone()}

    stored = grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    before = hooks(model)
    recomputed = grads()
    assert hooks(model) == before
    assert_close_gradients(recomputed, stored, 1e-5)


def test_recomputation_inside_another_draw_uses_its_own_noise() -> None:
    model = build("llama").train()
    perturbation = Perturbation(model, std=0.1)

    def grads() -> dict[str, Tensor]:
        with perturbation.attached(seed=1):
            first = loss(model)
        with perturbation.attached(seed=2):
            return gradients(model, first + loss(model))

    stored = grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_close_gradients(grads(), stored, 1e-5)


def test_recomputation_without_noise_is_refused_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: a checkpointing wrapper that we do not know of must not lead to silently wrong gradients."""
    monkeypatch.setattr(
        perturbed_layer.PerturbedLayer, "_checkpoint", lambda _, original, run, *args: original(run, *args)
    )
    model = build("llama").train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with Perturbation(model, std=0.1).attached(seed=1):
        value = loss(model)
    with pytest.raises(CheckpointError):
        value.backward()


@pytest.mark.parametrize("kind", ["llama", "gpt2", "olmo2"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_nothing_stays_on_the_model(kind: str, dtype: torch.dtype) -> None:
    model = build(kind, dtype=dtype)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    before, plain = hooks(model), loss(model)
    perturbation = Perturbation(model, std=0.1)
    with perturbation.attached(seed=1):
        assert hooks(model) != before
        assert not torch.equal(loss(model), plain)
        assert model.state_dict().keys() == state.keys()
    assert hooks(model) == before
    with pytest.raises(ZeroDivisionError), perturbation.attached(seed=1):
        raise ZeroDivisionError
    assert hooks(model) == before
    assert torch.equal(loss(model), plain)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert list(perturbation.state_dict()) == ["log_sigma"]
    assert [name for name, _ in perturbation.named_parameters()] == ["log_sigma"]


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_adapters_are_perturbed_like_their_base(dtype: torch.dtype) -> None:
    from peft import LoraConfig, get_peft_model

    base = build("llama", dtype=dtype)
    with Perturbation(base, std=0.1).attached(seed=1):
        expected = loss(base)
    model = get_peft_model(copy.deepcopy(base), LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    perturbation = Perturbation(model, std=0.1)
    with perturbation.attached(seed=1):
        value = loss(model)
    assert torch.allclose(value, expected, rtol=1e-4)  # adapters start at zero
    grads = gradients(model, value)
    assert any(grad.abs().max() > 0 for grad in grads.values())
    assert perturbation.log_sigma.grad is not None
    assert (perturbation.log_sigma.grad != 0).all()


@pytest.mark.parametrize("layers", ["some", "0-1,", "0,0-1", "0,2", "0-2", "1-0"])
def test_layers_that_the_model_does_not_have_are_refused(layers: str) -> None:
    with pytest.raises(TrimtabError, match=f"layers '{layers}'"):
        Perturbation(build("llama"), layers)


@pytest.mark.parametrize("std", [[0.1], [0.1, -0.1], -1.0, float("nan")])
def test_standard_deviations_that_do_not_fit_are_refused(std: float | list[float]) -> None:
    with pytest.raises(TrimtabError, match="perturbation std"):
        Perturbation(build("llama"), "all", std)


def test_attaching_twice_is_refused() -> None:
    perturbation = Perturbation(build("llama"))
    with perturbation.attached(seed=4), pytest.raises(TrimtabError, match="attached already, with seed 4"):
        perturbation.attached(seed=5).__enter__()


def test_layers_are_found_or_the_reason_is_named() -> None:
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 2, "num_heads": 2, "vocab_size": 9}
    both = T5ForConditionalGeneration(T5Config(**sizes))
    with pytest.raises(TrimtabError, match=r"T5.*one list of 2 modules, found 2 of them \(encoder.block, decoder.bl"):
        Perturbation(both)
    with pytest.raises(TrimtabError, match="decoder layers of a Linear: give a transformers causal language model"):
        Perturbation(nn.Linear(2, 2))
    model: Any = build("llama")
    experts = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model.model.layers[0].experts = experts  # as many experts as layers
    assert decoder_stack(model).layers == tuple(model.model.layers)
    model.config.num_hidden_layers = 5
    with pytest.raises(TrimtabError, match="expected one list of 5 modules, found none"):
        Perturbation(model)
