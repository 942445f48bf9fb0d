"""The head on its own, without noise on its logits and with it: hand numbers, finite differences, extreme logits."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.trainer.models.test_logprobs import build
from tests.unit.trainer.models.test_perturbation import loss
from torch import Tensor, nn

from trimtab.trainer.models import fused_head
from trimtab.trainer.models.architecture import ModelParts
from trimtab.trainer.models.noise import normals
from trimtab.trainer.models.perturbation import Perturbation, PerturbationCoverage


@pytest.fixture(autouse=True, params=[0, fused_head.KEPT_LOGITS], ids=["recomputed", "kept"])
def small_tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_head, "KEPT_LOGITS", request.param)
    monkeypatch.setattr(fused_head, "TILE_TOKENS", 2)
    monkeypatch.setattr(fused_head, "TILE_VOCABULARY", 3)


def parts(weight: Tensor) -> ModelParts:
    return ModelParts(nn.Identity(), weight, None)


def test_tiles_of_an_accelerator_are_larger() -> None:
    for device, size in (("cpu", 3), ("cuda", 12)):
        tiles = fused_head._tiles(13, 3, torch.device(device))
        assert [(tile.start, tile.stop) for tile in tiles] == [(i, min(i + size, 13)) for i in range(0, 13, size)]


def test_hand_numbers() -> None:
    """Logits (0, ln 2, ln 3, ln 2) have probabilities 1/8, 2/8, 3/8, 2/8."""
    weight = torch.tensor([[0.0], [math.log(2)], [math.log(3)], [math.log(2)]])
    logp, entropy, *_ = fused_head.token_scores(torch.ones(4, 1), torch.arange(4), parts(weight), entropy=True)
    assert logp.tolist() == pytest.approx([math.log(p / 8) for p in (1, 2, 3, 2)], abs=1e-6)
    expected = -sum(p / 8 * math.log(p / 8) for p in (1, 2, 3, 2))
    assert entropy.tolist() == pytest.approx([expected] * 4, abs=1e-6)


def test_temperature_hand_numbers() -> None:
    """At temperature 1/2 probabilities are squared: 1, 4, 9, 4 of 18; keeping the first two leaves 1 and 4 of 5."""
    weight = torch.tensor([[0.0], [math.log(2)], [math.log(3)], [math.log(2)]])
    ids = torch.tensor([2, 1])
    logp, *_ = fused_head.token_scores(torch.ones(2, 1), ids, parts(weight), temperature=0.5)
    assert logp.tolist() == pytest.approx([math.log(9 / 18), math.log(4 / 18)], abs=1e-6)
    kept = torch.tensor([[2, -1], [0, 1]])
    logp, entropy, *_ = fused_head.token_scores(
        torch.ones(2, 1), ids, parts(weight), temperature=0.5, kept=kept, entropy=True
    )
    assert logp.tolist() == pytest.approx([0.0, math.log(4 / 5)], abs=1e-6)
    assert entropy.tolist() == pytest.approx([0.0, -0.2 * math.log(0.2) - 0.8 * math.log(0.8)], abs=1e-6)


def test_the_sum_of_squares_is_that_of_the_distribution() -> None:
    """Logits (0, ln 2, ln 3, ln 2): (1 + 4 + 9 + 4) / 64; at temperature 1/2 (1 + 16 + 81 + 16) / 18^2."""
    weight = torch.tensor([[0.0], [math.log(2)], [math.log(3)], [math.log(2)]], requires_grad=True)
    for temperature, expected in ((1.0, 18 / 64), (0.5, 114 / 324)):
        scores = fused_head.token_scores(
            torch.ones(2, 1), torch.tensor([2, 1]), parts(weight), temperature=temperature, squares=True
        )
        assert scores.squares.tolist() == pytest.approx([expected] * 2, rel=1e-6)
        assert not scores.squares.requires_grad
        scores.logp.sum().backward()


def test_further_ids_have_their_log_probs_and_gradients() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(8, 3, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([0, 3, 7, 2, 5])
    further = torch.tensor([[1, 0], [3, 7], [-1, 6], [2, -1], [4, 4]])
    factors = torch.randn(5, 3, dtype=torch.float64)
    gradients = []
    for tiled in (True, False):
        if tiled:
            logp, _, others, _ = fused_head.token_scores(hidden, ids, parts(weight), temperature=0.7, further=further)
            assert (others.isneginf() == (further < 0)).all()
        else:
            table = (hidden @ weight.T / 0.7).log_softmax(-1)
            logp, others = table.gather(1, ids[:, None])[:, 0], table.gather(1, further.clamp(min=0))
        present = torch.where(further >= 0, others, 0.0)
        loss = (factors * torch.cat([logp[:, None], present], dim=1)).sum()
        gradients.append((loss.detach(), *torch.autograd.grad(loss, (hidden, weight))))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


@settings(deadline=None, max_examples=40)
@given(size=st.floats(0.01, 300.0), temperature=st.sampled_from([0.3, 1.0, 2.5]), seed=st.integers(0, 1000))
def test_extreme_logits_stay_finite_and_right(size: float, temperature: float, seed: int) -> None:
    """Logits up to thousands: log-prob and entropy as in float64, entropy within [0, ln V]."""
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(5, 3, generator=generator) * size, torch.randn(8, 3, generator=generator)
    ids = torch.randint(0, 8, (5,), generator=generator)
    logp, entropy, *_ = fused_head.token_scores(hidden, ids, parts(weight), temperature=temperature, entropy=True)
    exact = (hidden.double() @ weight.double().T / temperature).log_softmax(-1)
    scale = 1e-6 * (1 + exact.abs().max())
    assert entropy is not None
    assert (logp - exact.gather(1, ids[:, None])[:, 0]).abs().max() < 10 * scale
    assert (entropy + (exact.exp() * exact).sum(-1)).abs().max() < 10 * scale
    assert entropy.min() > -10 * scale
    assert entropy.max() < math.log(8) + 10 * scale


def test_a_model_that_diverged_scores_nan() -> None:
    weight = torch.ones(4, 2)
    weight[3, 0] = torch.nan
    logp, *_ = fused_head.token_scores(torch.ones(1, 2), torch.tensor([0]), parts(weight))
    assert logp.isnan().all()


SEED, STD = 5, 0.3
OWNER = nn.Identity()


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
    """Values and every gradient, log_sigma's too, with soft cap, temperature, entropy and sampling masks."""
    torch.manual_seed(1)
    tensors = [torch.randn(*shape, dtype=torch.float64) for shape in ((5, 3), (8, 3))]
    tensors.append(torch.full((1,), STD, dtype=torch.float64).log())
    ids = torch.tensor([0, 3, 7, 2, 5])
    kept = torch.tensor([[0, 7], [3, 4], [7, -1], [2, 1], [5, 0]]) if restricted else None

    def ours(hidden: Tensor, weight: Tensor, log_sigma: Tensor) -> tuple[Tensor, Tensor]:
        with fused_head.perturb_logits(OWNER, log_sigma, math.exp(log_sigma.item()), SEED):
            logp, entropy, *_ = fused_head.token_scores(
                hidden,
                ids,
                ModelParts(nn.Identity(), weight, softcap, head=OWNER),
                temperature=0.7,
                entropy=True,
                kept=kept,
            )
        return logp, entropy

    def naive(hidden: Tensor, weight: Tensor, log_sigma: Tensor) -> tuple[Tensor, Tensor]:
        logits = hidden @ weight.T
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
    with pytest.raises(ZeroDivisionError), perturbation.attached(seed=1):
        raise ZeroDivisionError
    assert torch.equal(loss(model), plain)
