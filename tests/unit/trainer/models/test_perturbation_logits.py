"""Noise on the logits, which are never held: against all logits at once, and by finite differences."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.unit.trainer.models.test_logprobs import batch, build, rows
from torch import Tensor, nn

from trimtab.trainer.models import fused_head
from trimtab.trainer.models.architecture import ModelParts
from trimtab.trainer.models.logprobs import score
from trimtab.trainer.models.noise import normals
from trimtab.trainer.models.perturbation import Perturbation, PerturbationCoverage

SEED, STD = 5, 0.3
OWNER = nn.Identity()


@pytest.fixture(autouse=True, params=[0, fused_head.KEPT_LOGITS], ids=["recomputed", "kept"])
def small_tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_head, "KEPT_LOGITS", request.param)
    monkeypatch.setattr(fused_head, "TILE_TOKENS", 2)
    monkeypatch.setattr(fused_head, "TILE_VOCABULARY", 3)


def full_noise(tokens: int, vocabulary: int, seed: int = SEED) -> Tensor:
    """The whole matrix, put together from the tiles."""
    noise = torch.full((tokens, vocabulary), torch.nan, dtype=torch.float64)
    for row in range(0, tokens, fused_head.TILE_TOKENS):
        for column in range(0, vocabulary, fused_head.TILE_VOCABULARY):
            part = noise[row : row + fused_head.TILE_TOKENS, column : column + fused_head.TILE_VOCABULARY]
            part[:] = normals(tuple(part.shape), seed, (row, column), device=part.device, dtype=part.dtype)
    return noise


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("restricted", [False, True])
def test_equals_all_logits_at_once(softcap: float | None, restricted: bool) -> None:
    """Values and every gradient, log_sigma's too, with soft cap, bias, temperature, entropy and sampling masks."""
    torch.manual_seed(1)
    tensors = [torch.randn(*shape, dtype=torch.float64) for shape in ((5, 3), (8, 3), (8,))]
    tensors.append(torch.full((1,), STD, dtype=torch.float64).log())
    ids = torch.tensor([0, 3, 7, 2, 5])
    kept = torch.tensor([[0, 7], [3, 4], [7, -1], [2, 1], [5, 0]]) if restricted else None

    def ours(hidden: Tensor, weight: Tensor, bias: Tensor, log_sigma: Tensor) -> tuple[Tensor, Tensor]:
        with fused_head.perturb_logits(OWNER, log_sigma, math.exp(log_sigma.item()), SEED):
            logp, entropy, *_ = fused_head.token_scores(
                hidden,
                ids,
                ModelParts(nn.Identity(), weight, bias, softcap, head=OWNER),
                temperature=0.7,
                entropy=True,
                kept=kept,
            )
        assert entropy is not None
        return logp, entropy

    def naive(hidden: Tensor, weight: Tensor, bias: Tensor, log_sigma: Tensor) -> tuple[Tensor, Tensor]:
        logits = hidden @ weight.T + bias
        if softcap is not None:
            logits = softcap * (logits / softcap).tanh()
        logits = (logits + log_sigma.exp() * full_noise(5, 8)) / 0.7
        if kept is not None:
            allowed = torch.zeros(5, 9, dtype=torch.bool).scatter_(1, kept.where(kept >= 0, 8), True)[:, :8]
            logits = logits.masked_fill(~allowed, -1e30)
        logp = logits.log_softmax(-1)
        return logp.gather(1, ids[:, None])[:, 0], -(logp.exp() * logp).sum(-1)

    results = []
    for scores in (ours, naive):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        logp, entropy = scores(*leaves)
        (torch.linspace(-1, 2, 5) * logp + torch.linspace(3, 1, 5) * entropy).sum().backward()
        results.append([logp, entropy, *(leaf.grad for leaf in leaves)])
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-12)
    assert results[0][-1].abs() > 1e-3
    assert torch.autograd.gradcheck(ours, [tensor.clone().requires_grad_() for tensor in tensors], fast_mode=True)


def loss(model: Any) -> Tensor:
    logp = torch.cat(rows(score(model, batch()).logp))
    return (torch.linspace(-1, 2, len(logp), dtype=logp.dtype) * logp).sum()


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_a_model_with_noisy_logits(kind: str) -> None:
    model = build(kind)
    perturbation = Perturbation(model, "logits", STD)
    assert perturbation.sigmas() == pytest.approx({"logits": STD})
    assert [name for name, _ in perturbation.named_parameters()] == list(perturbation.state_dict()) == ["log_sigma"]
    plain, other = loss(model), build(kind)
    with perturbation.attached(seed=SEED, coverage=(watch := PerturbationCoverage())):
        noisy = loss(model)
        assert torch.equal(loss(other), plain)  # a reference model scored meanwhile is clean
    assert watch.counts() == {}
    assert torch.equal(loss(model), plain)
    noisy.backward()  # after the context: the backward draws what the forward drew
    grad = perturbation.log_sigma.grad
    assert grad is not None
    values = []
    for step in (1e-2, -1e-2):
        moved = Perturbation(model, "logits", STD)
        with torch.no_grad():
            moved.log_sigma += step
        with moved.attached(seed=SEED), torch.no_grad():
            values.append(loss(model).item())
    assert (values[0] - values[1]) / 2e-2 == pytest.approx(grad.item(), rel=1e-2)
    with perturbation.attached(seed=SEED + 1), torch.no_grad():
        assert not torch.equal(loss(model), noisy)


def test_an_exception_removes_the_noise() -> None:
    model = build("llama")
    plain = loss(model)
    with pytest.raises(ZeroDivisionError), Perturbation(model, "logits", STD).attached(seed=1):
        raise ZeroDivisionError
    assert torch.equal(loss(model), plain)
