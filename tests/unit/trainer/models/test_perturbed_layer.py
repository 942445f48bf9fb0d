"""Small noise survives: the residual stream stays float32, and a measurement shows when rounding removes it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.unit.trainer.models.test_logprobs import batch, build
from torch import Tensor

from trimtab.trainer.models import invariant, logprobs, perturbed_layer
from trimtab.trainer.models.architecture import decoder_stack, is_block, model_parts
from trimtab.trainer.models.families import FAMILIES
from trimtab.trainer.models.logprobs import score
from trimtab.trainer.models.noise import normals
from trimtab.trainer.models.perturbation import Perturbation, PerturbationCoverage

BF16 = torch.bfloat16
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
    assert perturbation.log_sigma.grad is not None
    assert perturbation.log_sigma.grad.isfinite().all()


def test_a_float32_model_under_autocast_keeps_a_float32_stream_by_itself() -> None:
    model = build("llama")
    for perturbed in (False, True):
        with torch.autocast("cpu", BF16), types_of_streams(model) as types:
            if perturbed:
                with Perturbation(model).attached(seed=1):
                    score(model, batch())
            else:
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
    monkeypatch.setattr(perturbed_layer, "stream_dtype", lambda dtype: dtype)
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
