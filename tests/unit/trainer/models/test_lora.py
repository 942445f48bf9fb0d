"""LoRA adapters: a function of the seed, merged for the sampler as peft merges them."""

from __future__ import annotations

import peft
import pytest
import torch

from trimtab.trainer.build_model import add_lora, prepare_model
from trimtab.trainer.config import load_config
from trimtab.trainer.models import laboratory
from trimtab.trainer.models.laboratory import build
from trimtab.trainer.models.sharding import named_weights


def test_adapters_are_merged_as_peft_merges_them() -> None:
    plain, _ = build(0)
    names = set(plain.state_dict())
    model = add_lora(build(0)[0], rank=4, alpha=8, targets="all-linear")
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (".lora_" in name)
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    published = {name: weight.clone() for name, weight in named_weights(model)}
    assert set(published) == names

    reference = add_lora(build(0)[0], rank=4, alpha=8, targets="all-linear")
    reference.load_state_dict(model.state_dict())
    for module in reference.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            module.merge()
    merged = {name.replace(".base_layer", ""): weight for name, weight in reference.state_dict().items()}
    for name, weight in published.items():
        torch.testing.assert_close(weight, merged[name], rtol=0, atol=1e-6)
    query = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(published[query], plain.state_dict()[query])


def test_merging_on_the_fly_leaves_the_base_untouched() -> None:
    model = add_lora(build(0)[0], rank=2, alpha=16, targets="all-linear")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    list(named_weights(model))
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_have_the_bits_of_those_that_peft_widens(dtype: torch.dtype) -> None:
    model = add_lora(build(0)[0].to(dtype), rank=4, alpha=6, targets="all-linear")  # pyright: ignore[reportArgumentType]
    layers = [module for module in model.modules() if isinstance(module, peft.tuners.lora.LoraLayer)]
    trained, results = [weight for weight in model.parameters() if weight.requires_grad], []
    for widened in (layers[0].cast_input_dtype_enabled, True):
        for layer in layers:
            layer.cast_input_dtype_enabled = widened
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.float32):
            logits = model(input_ids=torch.tensor([[3, 5, 2, 7]])).logits
        results.append(torch.autograd.grad(logits.float().square().sum(), trained))
    assert all(torch.equal(ours, peft_own) for ours, peft_own in zip(*results, strict=True))
    assert any(bool(gradient.any()) for gradient in results[0])


def adapters(seed: int) -> torch.Tensor:
    config = load_config("laboratory", ["model.lora.rank=2", f"seed={seed}"])
    model = prepare_model(laboratory.build(0)[0], config)
    return torch.cat([weight.flatten() for name, weight in model.named_parameters() if ".lora_A." in name])


def test_equal_seeds_give_equal_adapters() -> None:
    first = adapters(0)
    state = torch.get_rng_state()
    assert torch.equal(first, adapters(0))
    assert not torch.equal(first, adapters(1))
    assert torch.equal(state, torch.get_rng_state())
