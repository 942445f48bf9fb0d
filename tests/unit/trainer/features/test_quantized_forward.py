"""The forward with rounded weights: what it computes, where its gradient goes, and that nothing of it stays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from trimtab.errors import TrimtabError
from trimtab.trainer.config import load_config
from trimtab.trainer.engines.embedded.weight_quantization import matrices, quantize
from trimtab.trainer.features.feature import ForwardPass, Purpose
from trimtab.trainer.features.quantized_forward import QuantizedForward
from trimtab.trainer.models import laboratory
from trimtab.trainer.models.logprobs import TokenBatch, score
from trimtab.trainer.ranks import RankGroup

MICRO: Any = None  # the feature does not read it
PROMPTS, RESPONSES = ([np.array(ids) for ids in lists] for lists in ([[1, 2, 3], [4, 5]], [[6, 7], [8, 9, 1]]))
TOKENS = TokenBatch.pack(PROMPTS, RESPONSES, [0, 1], pad_id=0)


def feature(model: torch.nn.Module, dtype: str = "float32", ranks: RankGroup | None = None) -> QuantizedForward:
    config = load_config("laboratory", ["engine.quantize=int4", f"engine.dtype={dtype}"])
    return QuantizedForward(config, model, ranks or RankGroup())


def backward(model: torch.nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    logp = score(model, TOKENS).logp
    logp.sum().backward()
    return logp.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["laboratory", "laboratory-moe"])
def test_forward_and_gradient_are_those_at_the_rounded_weights(name: str) -> None:
    model, rounded = laboratory.build(0, name)[0], laboratory.build(0, name)[0]
    before = [name for name, _ in model.named_parameters()]
    rounds = matrices(model)
    for key in rounds:
        weight = rounded.get_parameter(key).data
        weight.copy_(quantize(weight, 4))
    exact = backward(model)[0]
    expected = backward(rounded)
    with feature(model).forward(ForwardPass(MICRO, "train")):
        logp = score(model, TOKENS).logp
    model.zero_grad()
    logp.sum().backward()  # outside of the context, as in training
    assert torch.equal(logp.detach(), expected[0])
    assert float((logp.detach() - exact).abs().max()) > 1e-3
    gradients = {key: p.grad for key, p in model.named_parameters()}
    assert_close(gradients, expected[1], rtol=0, atol=0)
    assert all(bool(gradients[key].any()) for key in rounds)
    assert [name for name, _ in model.named_parameters()] == before
    assert torch.equal(score(model, TOKENS).logp, exact)


@pytest.mark.parametrize("purpose", ["proximal", "prepare", "probe", "reference"])
def test_every_forward_of_the_policy_is_rounded_and_none_of_the_reference(purpose: Purpose) -> None:
    model = laboratory.build(0)[0]
    key = matrices(model)[0]
    module, leaf = model.get_submodule(key.rpartition(".")[0]), key.rpartition(".")[2]
    weight = getattr(module, leaf).detach().clone()
    expected = weight if purpose == "reference" else quantize(weight.bfloat16(), 4).float()
    with feature(model, "bfloat16").forward(ForwardPass(MICRO, purpose)):
        assert torch.equal(getattr(module, leaf), expected)
    assert torch.equal(getattr(module, leaf), weight)


def test_sharded_weights_are_refused() -> None:
    with pytest.raises(TrimtabError, match=r"model\.quantized_forward needs whole matrices"):
        feature(laboratory.build(0)[0], ranks=RankGroup(rank=0, size=2))
