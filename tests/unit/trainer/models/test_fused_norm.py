"""The fused norm against transformers' own, with its gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from trimtab.trainer.models.fused_norm import use_fused_norms


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.final_norm = Qwen2RMSNorm(8, eps=1e-5), Qwen2RMSNorm(8, eps=1e-5)
        self.input_layernorm.weight.data = torch.linspace(-1, 2, 8)


def run(layer: Layer, states: torch.Tensor, *, autocast: bool) -> list[torch.Tensor]:
    states = states.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        outs = [layer.input_layernorm(states), layer.final_norm(states)]
    weights = torch.randn(2, *states.shape, generator=torch.Generator().manual_seed(1))
    loss = sum((out.float() * weight).sum() for out, weight in zip(outs, weights, strict=True))
    inputs = [states, *layer.parameters()]
    return [out.detach() for out in outs] + list(torch.autograd.grad(loss, inputs))  # type: ignore[arg-type]


@pytest.mark.parametrize("autocast", [False, True])
def test_values_and_gradients_are_those_of_transformers(autocast: bool) -> None:
    layer = Layer()
    fused = copy.deepcopy(layer)
    use_fused_norms(fused)
    states = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    theirs, ours = (run(one, states, autocast=autocast) for one in (layer, fused))
    # Only the norm before products has autocast's dtype, in which each product would round its input.
    assert [out.dtype for out in ours[:2]] == [torch.bfloat16 if autocast else torch.float32, torch.float32]
    torch.testing.assert_close(ours[0].float(), theirs[0].to(ours[0].dtype).float())
    for one, other in zip(ours[1:], theirs[1:], strict=True):
        torch.testing.assert_close(one, other, rtol=0.02 if autocast else 1e-5, atol=0.02 if autocast else 1e-5)
