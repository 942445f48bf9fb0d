"""Noise on decoder layers: where it goes, its gradient, a stream in which small noise survives, nothing left behind."""

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
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from trimtab.errors import TrimtabError
from trimtab.trainer.models import invariant, logprobs
from trimtab.trainer.models import perturbation as perturbation_module
from trimtab.trainer.models.architecture import FAMILIES, decoder_stack, is_block, model_parts
from trimtab.trainer.models.logprobs import score
from trimtab.trainer.models.noise import normals
from trimtab.trainer.models.perturbation import Perturbation, PerturbationCoverage

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
        perturbation_module.PerturbedLayer, "_checkpoint", lambda _, original, run, *args: original(run, *args)
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
    lora = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(copy.deepcopy(base), lora).get_base_model()
    perturbation = Perturbation(model, std=0.1)
    with perturbation.attached(seed=1):
        value = loss(model)
    assert torch.allclose(value, expected, rtol=1e-4)  # adapters start at zero
    grads = gradients(model, value)
    assert any(grad.abs().max() > 0 for grad in grads.values())
    assert (perturbation.log_sigma.grad != 0).all()


def test_what_does_not_fit_is_refused() -> None:
    """Layers that the model does not have, and other standard deviations."""
    model = build("llama")
    for layers in ("some", "0-1,", "0,0-1", "0,2", "0-2", "1-0"):
        with pytest.raises(TrimtabError, match=f"layers '{layers}'"):
            Perturbation(model, layers)
    for std in ([0.1], [0.1, -0.1], -1.0, float("nan")):
        with pytest.raises(TrimtabError, match="perturbation std"):
            Perturbation(model, "all", std)


def test_the_experts_of_a_layer_are_no_layers() -> None:
    model: Any = build("llama")
    model.model.layers[0].experts = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])  # as many as layers
    assert decoder_stack(model).layers == tuple(model.model.layers)


SMALL_STD = 1e-4


def large_entries(model: Any) -> Any:
    """No entry of the embedding below 0.5 in size, where bfloat16 has steps of 0.0039: far above the noise."""
    weight = model.get_input_embeddings().weight
    with torch.no_grad():
        if model.config.model_type == "gpt2":
            model.transformer.wpe.weight.zero_()  # the sum of the two could be small again
        weight.copy_(torch.where(weight < 0, -1, 1) * (0.5 + weight.abs()))
    return model


@contextmanager
def types_of_streams(model: Any) -> Iterator[dict[str, list[torch.dtype]]]:
    """The types each layer, each block inside it, and whatever follows the backbone are given."""
    types: dict[str, list[torch.dtype]] = {"layer": [], "block": [], "final": []}

    def note(where: str) -> Any:
        def hook(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            types[where].append((args[0] if args else kwargs["hidden_states"]).dtype)

        return hook

    handles = []
    for layer in decoder_stack(model).layers:
        handles.append(layer.register_forward_pre_hook(note("layer"), with_kwargs=True))
        handles += [
            child.register_forward_pre_hook(note("block"), with_kwargs=True)
            for child in layer.children()
            if is_block(child)
        ]
    backbone = model_parts(model).backbone
    handles.append(
        backbone.register_forward_hook(lambda _, __, out: types["final"].append(out.last_hidden_state.dtype))
    )
    yield types
    for handle in handles:
        handle.remove()


def changed(model: Any, *, autocast: bool = False, layers: str = "all", std: float = SMALL_STD) -> dict[str, float]:
    watch = PerturbationCoverage()
    noise = Perturbation(model, layers, std)
    with torch.no_grad(), torch.autocast("cpu", BF16, enabled=autocast), noise.attached(seed=1, coverage=watch):
        score(model, batch())
    return shares(watch)


def shares(watch: PerturbationCoverage) -> dict[str, float]:
    """The share of changed entries by layer."""
    return {layer: changed / seen for layer, (changed, seen) in watch.counts().items()}


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_a_half_precision_model_keeps_a_float32_stream(kind: str) -> None:
    """From the first perturbed layer on; products still see bfloat16, and so does the head."""
    changes = {"num_hidden_layers": 3, "n_layer": 3, "no_rope_layers": [1, 0, 1]}
    model = build(kind, dtype=BF16, **changes)
    with torch.no_grad():
        plain = score(model, batch()).logp
    perturbation = Perturbation(model, "1", SMALL_STD)
    with perturbation.attached(seed=1), types_of_streams(model) as types:
        logp = score(model, batch()).logp
    logp.sum().backward()
    assert types["layer"] == [BF16, torch.float32, torch.float32]
    assert set(types["block"]) == {BF16}
    assert types["final"] == [BF16]
    # No further from the exact model than the model's own rounding is: the change is a change of rounding. Both are
    # means over few tokens, their ratio is about 1; measured up to 1.23 over 26 models.
    exact = build(kind, **changes)
    exact.load_state_dict(model.state_dict())
    with torch.no_grad():
        reference = score(exact, batch()).logp
    assert (logp - plain).abs().max() > 0
    assert (logp - reference).abs().mean() < 2.5 * (plain - reference).abs().mean()
    assert perturbation.log_sigma.grad.isfinite().all()


def test_a_float32_model_under_autocast_keeps_a_float32_stream() -> None:
    model = build("llama")
    with torch.autocast("cpu", BF16), types_of_streams(model) as types, Perturbation(model).attached(seed=1):
        score(model, batch())
    assert types["layer"] == [torch.float32, torch.float32]
    assert types["final"] == [torch.float32]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "olmo2", "gemma2"])
def test_small_noise_reaches_the_products_unless_the_stream_rounds_it_away(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault is the obvious way: a bfloat16 stream. The measure must call that a no-op."""
    model = large_entries(build(kind, dtype=BF16))
    kept = changed(model, layers="0", std=4e-4)
    monkeypatch.setattr(perturbation_module, "stream_dtype", lambda dtype: dtype)
    lost = changed(model, layers="0", std=4e-4)
    assert lost == {"0": 0.0}
    if kind == "olmo2":  # no norm before its attention: a bfloat16 product sees what a bfloat16 stream would hold
        assert kept == {"0": 0.0}
    else:
        assert kept["0"] > 1e-3


def test_changed_counts_what_this_layer_alone_changed() -> None:
    """By hand: round(norm(h + sigma eps)) against round(norm(h)), h with the noise of the layers before."""
    model = build("llama")
    inputs: list[Tensor] = []
    hooks = [layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0])) for layer in model.model.layers]
    result = changed(model, autocast=True, std=0.01)
    for index, (layer, hidden) in enumerate(zip(model.model.layers, inputs, strict=True)):
        hooks[index].remove()
        noise = normals(tuple(hidden.shape), 1, (index,), device=hidden.device, dtype=torch.float32)
        noisy, clean = (layer.input_layernorm(h).to(BF16) for h in (hidden + 0.01 * noise, hidden))
        assert result[str(index)] == (noisy != clean).double().mean().item()
        assert 0.1 < result[str(index)] < 0.95
    assert changed(model, autocast=True, std=0.01, layers="1").keys() == {"1"}
    # A float32 product sees nearly everything, so rounding is what is measured.
    assert changed(model, std=0.01)["0"] > 0.98


def test_fillers_of_an_invariant_model_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    invariant.make_invariant(model)

    def counted() -> dict[str, tuple[int, int]]:
        watch = PerturbationCoverage()
        with torch.autocast("cpu", BF16), Perturbation(model, std=0.01).attached(seed=1, coverage=watch):
            score(model, batch())
        return watch.counts()

    result = counted()
    monkeypatch.setattr(logprobs, "padding_rows", lambda *_: 0)
    assert result == counted()


@pytest.mark.parametrize(
    ("kind", "autocast"),
    [*((kind, False) for kind in sorted(FAMILIES)), ("llama", True), ("gpt2", True)],
)
def test_watching_changes_no_score(kind: str, autocast: bool) -> None:
    model = build(kind, dtype=torch.float32 if autocast else BF16)
    perturbation, watch = Perturbation(model, std=0.01), PerturbationCoverage()
    with torch.autocast("cpu", BF16, enabled=autocast):
        with perturbation.attached(seed=1):
            plain = score(model, batch()).logp
        with perturbation.attached(seed=1, coverage=watch):
            watched = score(model, batch()).logp
    assert torch.equal(watched, plain)
    assert shares(watch).keys() == {"0", "1"}
    assert all(0 < share < 1 for share in shares(watch).values())


def test_several_passes_are_pooled() -> None:
    watch = PerturbationCoverage()
    ones = torch.ones(4)
    watch.add("3", ones, torch.tensor([1.0, 2.0, 1.0, 1.0]))
    watch.add("3", ones[:2], torch.tensor([0.0, 0.0]))
    watch.add("4", ones, ones)
    assert watch.counts() == {"3": (3, 6), "4": (0, 4)}


def test_checkpointing_watches_once() -> None:
    """The recomputation is not measured again."""
    model = build("llama").train()
    perturbation = Perturbation(model, std=0.01)
    counts = []
    for _ in range(2):
        watch = PerturbationCoverage()
        with perturbation.attached(seed=1, coverage=watch):
            value = score(model, batch()).logp.sum()
        value.backward()
        counts.append(watch.counts())
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert counts[0] == counts[1]
