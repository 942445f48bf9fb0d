"""The head in Triton's interpreter: fixed tiles of words, the same bits in any batch, and closeness to float64."""

from __future__ import annotations

import math

import pytest
import torch
from tests.support.triton_support import INTERPRETED, REASON, differences, tile_products  # noqa: F401
from torch import Tensor

from trimtab.trainer.models import fused_head
from trimtab.trainer.models.architecture import ModelParts
from trimtab.trainer.models.invariant.kernels import row_kernels
from trimtab.trainer.models.invariant.kernels.row_kernels import add_exponentials, rms_norm
from trimtab.trainer.models.matmul import linear_by

if not INTERPRETED:
    pytest.skip(REASON, allow_module_level=True)

VOCABULARY = 300  # two whole tiles of 128 and a part


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes milliseconds for a program, whatever its size."""
    monkeypatch.setattr(row_kernels, "WORDS", 128)
    monkeypatch.setattr(row_kernels, "ROWS", 4)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def logsumexp(logits: Tensor) -> Tensor:
    return add_exponentials(torch.full((len(logits),), torch.finfo(torch.float32).min / 2), logits)


def test_logsumexp_by_hand() -> None:
    assert logsumexp(torch.tensor([[0.0, 0.0], [1e4, 1e4], [-torch.inf, 3.0]])).tolist() == pytest.approx(
        [math.log(2), 1e4 + math.log(2), 3.0]
    )
    assert logsumexp(random(0, 5)).shape == (0,)


def test_rows_do_not_depend_on_each_other() -> None:
    # Normalised: near 0 no rounding of the logarithm hides a difference.
    logits = (random(7, VOCABULARY) * 5).log_softmax(-1)
    assert differences(logsumexp, logits) == []
    assert differences(lambda rows: add_exponentials(torch.zeros(len(rows)), rows), logits) == []


def test_words_that_cannot_be_drawn_change_nothing() -> None:
    """Sets of kept ids are filled up to the longest of the batch."""
    logits = random(3, VOCABULARY)
    filled = torch.cat([logits, torch.full((3, 200), -torch.inf)], -1)
    assert torch.equal(logsumexp(filled), logsumexp(logits))


def test_further_words_are_added() -> None:
    logits = random(5, VOCABULARY) * 3
    result = add_exponentials(logsumexp(logits[:, :256]), logits[:, 256:])
    torch.testing.assert_close(result, logits.logsumexp(-1))
    assert torch.equal(add_exponentials(result, torch.full((5, 7), -torch.inf)), result)


def test_the_head_gives_each_token_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer takes the head in parts of tokens and words, and the sampler sees a few rows of its own."""
    monkeypatch.setattr(fused_head, "TILE_TOKENS", 4)
    monkeypatch.setattr(fused_head, "TILE_VOCABULARY", 128)
    hidden, weight = random(7, 32), random(VOCABULARY, 32, seed=1)
    ids = torch.tensor([0, 127, 128, 255, 256, 299, 7])
    model = ModelParts(torch.nn.Identity(), weight, None, invariant=True)
    logp = fused_head.token_scores(hidden, ids, model, temperature=0.7).logp
    exact = (hidden.double() @ weight.double().T / 0.7).log_softmax(-1).gather(1, ids[:, None])[:, 0]
    assert (logp.double() - exact).abs().max() < 5e-5
    for rows in (slice(3, 4), slice(4, 6)):
        logits = fused_head.head_logits(hidden[rows], model, fused_head.pack_head(model))
        assert torch.equal(fused_head.log_probs(logits, ids[rows], 0.7), logp[rows])


def test_gradients() -> None:
    states, weight = random(2, 5, 32), random(7, 32, seed=1)
    scale = random(32, seed=2)
    leaves = [x.clone().requires_grad_() for x in (states, weight, scale)]
    probe = random(2, 5, 7, seed=3)
    normal = rms_norm(leaves[0], leaves[2], 1e-5)
    (linear_by(row_kernels.batch_invariant_matmul, normal, leaves[1], None) * probe).sum().backward()
    exact = [x.double().requires_grad_() for x in (states, weight, scale)]
    normal = exact[0] * (exact[0].square().mean(-1, keepdim=True) + 1e-5).rsqrt() * exact[2]
    ((normal @ exact[1].T) * probe).sum().backward()
    for leaf, expected in zip(leaves, exact, strict=True):
        torch.testing.assert_close(leaf.grad.double(), expected.grad, rtol=1e-4, atol=1e-5)
